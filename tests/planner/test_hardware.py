"""A step on several clusters: figures against manual arithmetic, prices, the command."""

import dataclasses
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import ClusterError, known_kinds, parse_cluster, usual_sizes
from costmodels.prices import Price, load_prices
from planner import make_plan
from planner.cli import main as cli
from planner.compare.fitting import fit
from planner.compare.hardware import (
    APART,
    Offer,
    Offers,
    _marked,
    compare_hardware,
    step_of,
)
from planner.compare.hardware import (
    offer as offer_of,
)
from planner.compare.offers_text import dollars_text, offers_json, offers_parts, rate_text
from planner.errors import MemoryLimitError, RequestError
from planner.graph.jaxpr.products import products_of
from planner.graph.trace import trace
from planner.html.offers import offers_html
from planner.plan.plan import Plan
from planner.report.layout import plain_text
from planner.spec import PLAIN

MODEL = """import jax, jax.numpy as jnp
def train_step(w, ids):
    def loss(w):
        h = jnp.tanh(w["e"][ids] @ w["a"])
        return jnp.mean((h @ w["e"].T) ** 2)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, jax.grad(loss)(w)), loss(w)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"e": f(512, 256), "a": f(256, 256)}, jax.ShapeDtypeStruct((64, 128), jnp.int32)
"""


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ARGS = (struct(1024, 1024), struct(4096, 1024))
PRICES = {"h100": Price(3.0, "test"), "v5e": Price(1.0, "test")}


def test_figures_are_what_they_say() -> None:
    found = compare_hardware(
        step, *ARGS, clusters=["h100:8", "v5e:2x2", "b200:8"], batches=[4096, 8192], prices=PRICES
    )
    assert found.unit == "examples" and len(found.offers) == 6
    one = found.offers[1]
    assert (one.cluster, one.devices, one.examples, one.tokens) == ("h100:8", 8, 8192, 0)
    plan = make_plan(step, ARGS[0], struct(8192, 1024), cluster="h100:8")
    assert one.plan == plan
    flop = 2 * 2.0 * 8192 * 1024 * 1024  # x @ w, and x.T @ its cotangent
    assert one.mfu == pytest.approx(flop / (8 * 494.7e12) / plan.prediction.step_s)
    assert one.per_second == pytest.approx(8192 / plan.prediction.step_s)
    assert one.dollars_per_step == pytest.approx(8 * 3.0 * plan.prediction.step_s / 3600)
    assert one.dollars_per_million == pytest.approx(one.dollars_per_step / 8192 * 1e6)
    assert math.isnan(found.offers[4].dollars_per_step)
    assert found.cheapest in found.offers[:4] and found.fastest in found.offers


def test_without_batches_the_arguments_are_as_they_are() -> None:
    found = compare_hardware(step, *ARGS, clusters=["h100:8"])
    assert found.offers[0].plan == make_plan(step, *ARGS, cluster="h100:8")
    assert found.offers[0].pareto and found.cheapest is None


@pytest.mark.long
def test_larger_batches_take_the_recipe_of_the_smaller() -> None:
    """As many more of the same microbatches; nothing is looked for again."""
    cluster = parse_cluster("h100:8")
    plan = make_plan(step, *ARGS, cluster=cluster, microbatches=2, remat="full", mesh="data=8")
    small = Offer("h100:8", "h100", 8, 4096, 0, plan)

    def larger(rows: int, like: Offer | None = small, **options: Any) -> Plan:
        args = (ARGS[0], struct(rows, 1024))
        found = offer_of(step, step_of(trace(step, args), args), cluster, {}, options, like).plan
        assert found is not None
        return found

    note = "mesh and remat as for batch 4096, with 4 times its microbatches"
    assert larger(16384).notes[-1] == note
    assert larger(16384).recipe == dataclasses.replace(plan.recipe, microbatches=8)
    assert larger(16384).mesh == plan.mesh
    alone = make_plan(step, ARGS[0], struct(16384, 1024), cluster=cluster)
    plain = dataclasses.replace(small, plan=make_plan(step, *ARGS, cluster=cluster))
    assert larger(16384, None) == larger(16384, plain) == alone
    assert larger(16384, remat="none") == alone  # what is given is not taken from another
    assert larger(6144).recipe == PLAIN  # no multiple
    many = dataclasses.replace(plan, microbatches=64)
    assert larger(16384, dataclasses.replace(small, plan=many)).recipe == PLAIN


def test_tokens_are_counted() -> None:
    def embed(w: jax.Array, ids: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean((w[ids] @ w.T) ** 2))(w)

    args = (struct(512, 256), struct(64, 128, dtype=jnp.int32))
    found = compare_hardware(embed, *args, clusters=["h100:8"], batches=[32])
    assert found.unit == "tokens" and found.offers[0].tokens == 32 * 128


def test_what_does_not_fit_or_trace_has_a_place() -> None:
    def written(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean((x.reshape(4096, -1) @ w) ** 2))(w)

    found = compare_hardware(written, *ARGS, clusters=["h100:8"], batches=[4096, 1000])
    assert found.offers[0].plan is not None
    assert found.offers[1].refused.startswith("the step can't be traced with 1000 examples")
    small = compare_hardware(step, *ARGS, clusters=["h100:8", "v5e:2x2"], memory=1000.0)
    assert all("no plan fits" in o.refused for o in small.offers)
    assert small.fastest is None and "no plan" in json.dumps(offers_json(small))
    assert "no plan fits" in html.unescape(offers_html(small))


def test_bad_requests() -> None:
    with pytest.raises(RequestError, match="no argument of the step is a batch"):
        compare_hardware(lambda w: w * 2, struct(8, 8), clusters=["h100:8"], batches=[4])
    for wrong in (0, -4, 2.5, True):
        with pytest.raises(RequestError, match="expected a whole number of examples"):
            compare_hardware(step, *ARGS, clusters=["h100:8"], batches=[wrong])  # type: ignore[list-item]
    with pytest.raises(ClusterError):
        compare_hardware(step, *ARGS, clusters=["h10:8"])


def offer(kind: str, per_second: float, dollars: float | None) -> Offer:
    """One of 1,000 tokens a step."""
    plan = make_plan(step, *ARGS, cluster="h100:8")
    timed = dataclasses.replace(plan.prediction, step_s=1000 / per_second)
    price = None if dollars is None else Price(dollars * per_second * 3600 / 1e6, "")
    return Offer(kind, kind, 1, 10, 1000, dataclasses.replace(plan, prediction=timed), 0.5, price)


@pytest.mark.long
def test_what_none_beats_is_marked() -> None:
    rows = [
        offer("a", 100, 1.0),
        offer("b", 200, 2.0),
        offer("c", 150, 2.5),  # b is faster and cheaper
        offer("d", 100 / (1 + APART) * 2, 1.001),  # as good as a can be told apart from
        offer("e", 300, None),
        offer("e", 250, None),  # slower on the same device
    ]
    assert rows[0].dollars_per_million == pytest.approx(1.0)
    assert [o.pareto for o in _marked(rows)] == [True, True, False, True, True, False]


@pytest.mark.usefixtures("published_runs")
def test_clusters_whose_likely_ranges_overlap_are_tied() -> None:
    plan = make_plan(step, *ARGS, cluster="h100:8")

    def taking(cluster: str, step_s: float, units: int = 1000) -> Offer:
        timed = dataclasses.replace(plan.prediction, step_s=step_s)
        kind = cluster.partition(":")[0]
        made = dataclasses.replace(
            plan, prediction=timed, cluster=cluster, device=kind, strategy="FSDP over 8"
        )
        price = Price(3600.0 if kind == "h100" else 1000.0, "test")
        return Offer(cluster, kind, 1, 10, units, made, 0.5, price)

    best, near, far, wide, apart, host = rows = (
        taking("h100:8", 1.0),  # 0.96 to 1.21 s
        taking("h100:8", 2.1, 2000),  # another batch: 5 % slower
        taking("h100:8", 2.2, 2000),
        taking("v5e:2x4", 1.3),  # from 1.17 s on
        taking("v5e:2x4", 1.4),  # from 1.26 s on
        taking("cpu:8", 1.01),
    )
    found = Offers("tokens", (*rows, Offer("b200:8", "b200", 8, 10, 1000, None, refused="no")))
    assert found.fastest == best and found.tied_fastest == (near, wide)
    assert found.cheapest == host and found.tied_cheapest == (), "no run on a CPU is published"
    priced = dataclasses.replace(found, offers=found.offers[:5])
    assert priced.cheapest == wide and priced.tied_cheapest == ()
    data = offers_json(found)["offers"]
    assert [o.get("tied") for o in data] == [False, True, False, True, False, False, None]
    assert (data[0]["low_s"], data[0]["high_s"]) == pytest.approx((0.96, 1.21))
    assert data[5]["low_s"] is None and far in found.offers and apart in found.offers
    text = plain_text(offers_parts(found), 80)
    assert "h100:8, batch 10; tied with h100:8, batch 10 and v5e:2x4, batch 10" in " ".join(
        text.split()
    )
    assert text.count("tied 952") == 1 and text.count("tied 769") == 1 and "tied: could" in text
    page = html.unescape(offers_html(found))
    assert page.count("(tied)") == 2 and "tied: could" in page
    assert "tied" not in offers_html(dataclasses.replace(found, offers=(best, apart)))


def test_products_are_counted_in_loops_branches_and_calls() -> None:
    def inside(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.jit(lambda c: c @ c)(c), None

        y = jax.lax.scan(body, x, None, length=5)[0]
        return jax.lax.cond(y[0, 0] > 0, lambda y: y @ y @ y, lambda y: y, y)

    one = 2.0 * 16**3
    jaxpr = jax.make_jaxpr(inside)(jnp.ones((16, 16)))
    assert products_of(jaxpr) == {"float32": 7 * one}
    low = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16))
    assert products_of(low(jnp.ones((16, 16)))) == {"bfloat16": one}

    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    made = jax.make_jaxpr(conv)(jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4)))
    assert products_of(made) == {"float32": 2.0 * 2 * 8 * 8 * 4 * 3 * 3 * 3}


def test_prices_have_sources_and_can_be_replaced(tmp_path: Path) -> None:
    catalog = load_prices()
    assert set(catalog) <= set(known_kinds())
    assert all(re.search(r"\d{4}-\d\d-\d\d", p.source) for p in catalog.values())
    path = tmp_path / "prices.toml"
    path.write_text('H100 = 2\nv5p = {dollars_per_hour = 4.5, source = "a contract"}\n')
    found = load_prices(path)
    assert found["h100"] == Price(2.0, str(path)) and found["v5p"] == Price(4.5, "a contract")
    assert found["a100"] == catalog["a100"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10 = 2", "unknown device 'h10'; did you mean h100"),
        ("h100 = -2", "expected more than 0, got -2"),
        ("h100 = inf", "expected more than 0, got inf"),
        ("h100 = true", "expected dollars per device and hour, got True"),
        ("[h100]\nprice = 2", "h100 has an unknown key 'price'"),
        ("[h100", "prices .*prices.toml: "),
    ],
)
def test_bad_prices(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=said):
        load_prices(path)


def test_a_missing_file_of_prices(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read prices .*No such file"):
        load_prices(tmp_path / "none.toml")


def test_texts() -> None:
    assert [rate_text(x) for x in (12.3, 189769.0, 2.5e6, math.inf)] == [
        "12.3",
        "190k",
        "2.5M",
        "-",
    ]
    assert [dollars_text(x) for x in (0.1869, 12345.6, math.nan, 9.65e-5)] == [
        "$0.187",
        "$12,346",
        "-",
        "$0.000097",
    ]


@pytest.mark.long
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "user_hardware.py"
    path.write_text(MODEL)
    page = tmp_path / "out.html"
    words = ["compare", str(path), "--cluster", "h100:4", "--cluster", "v6e:2x2"]
    assert cli.main([*words, "--batch", "64,128", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out and "not known: give it in a file, v6e = DOLLARS" in out
    assert max(map(len, out.splitlines())) <= 80
    text = page.read_text(encoding="utf-8")
    assert text.count("<circle") == 4 and "http" not in text.replace("http-equiv", "")
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [o["cluster"] for o in found["offers"]] == ["h100:4", "v6e:2x2"]
    assert found["offers"][1]["dollars_per_step"] is None
    assert cli.main(["compare", str(path), "--batch", "32"]) == 0
    assert "cpu:8" in capsys.readouterr().out
    for wrong in (["--batch", "a"], ["--batch", "0"], ["--price", str(tmp_path / "no.toml")]):
        assert cli.main([*words, *wrong]) == 2
        assert capsys.readouterr().err.startswith("planner: error: ")
    assert cli.main(["compare", str(path), "--html", str(page)]) == 2
    assert cli.main([*words, "--cluster", "h10:8"]) == 2
    assert cli.main(["compare", "--plan", "a.json", "b.json", "--batch", "32"]) == 2
    assert "are for a MODEL" in capsys.readouterr().err


def test_a_page_without_a_plan_or_with_one_offer() -> None:
    found = compare_hardware(step, *ARGS, clusters=["h100:8"], prices=PRICES)
    page = offers_html(found, "a <b>model</b>")
    assert "<b>" not in page and page.count("<circle") == 1
    assert "<circle" not in offers_html(Offers("tokens", ()))


@pytest.mark.long
def test_the_smallest_cluster_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = (struct(8192, 16384), struct(65536, 8192))
    found = fit(step, *shapes, kinds=["v5e", "h100"], prices=PRICES)
    for one in found:
        assert one.offer is not None and one.offer.plan is not None
        sizes = usual_sizes(one.kind)
        assert one.offer.cluster in sizes
        for smaller in sizes[: sizes.index(one.offer.cluster)]:
            with pytest.raises(MemoryLimitError):
                make_plan(step, *shapes, cluster=smaller)
        if one.at_once:
            held = make_plan(
                step,
                shapes[0],
                struct(one.at_once, 8192),
                cluster=one.offer.cluster,
                microbatches=1,
            )
            assert held.prediction.peak_bytes <= held.prediction.limit_bytes
            with pytest.raises(MemoryLimitError):
                make_plan(
                    step,
                    shapes[0],
                    struct(2 * one.at_once, 8192),
                    cluster=one.offer.cluster,
                    microbatches=1,
                    remat=one.offer.plan.remat,
                    chunks=one.offer.plan.chunks,
                )
    (none,) = fit(step, *shapes, kinds=["v5e"], memory=1e5)
    assert none.offer is None and "no plan fits" in none.refused
    with pytest.raises(ClusterError, match="usual sizes are not known"):
        fit(step, *shapes, kinds=["tpu7x"])
    path = tmp_path / "user_fit.py"
    path.write_text(MODEL)
    assert cli.main(["fit", str(path), "--device", "h100", "--device", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "h100:1" in out and "v5e:1x1" in out and max(map(len, out.splitlines())) <= 80
    assert cli.main(["fit", str(path), "--device", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"][0]["cluster"] == "h100:1"
    assert cli.main(["fit", str(path), "--device", "h10"]) == 2
    assert "did you mean h100" in capsys.readouterr().err
