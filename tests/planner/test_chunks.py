"""Rows of large products in chunks: equal to the step as it is, or left; and what they hold."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner import compat
from planner.chunks.resize import Cut
from planner.chunks.rewrite import chunked, in_chunks
from planner.errors import RequestError
from planner.graph.flat import nbytes
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json
from planner.planning import plan_step
from planner.recipes import Recipe, rewritten
from planner.report.sections.recipe import recipe_lines
from tests.zoo.running import difference

B, T, H, D = 4, 64, 2, 4
PARTS = 8


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)


def weighted(scores: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def causal(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return weighted(jnp.where(mask, scores(q, k), -1e30), v)


def window(q: Any, k: Any, v: Any) -> Any:
    far = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    return weighted(jnp.where((far >= 0) & (far < 16), scores(q, k), -jnp.inf), v)


def capped(q: Any, k: Any, v: Any) -> Any:
    return weighted(50.0 * jnp.tanh(scores(q, k) / 50.0), v)


def grouped(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], is_causal=True)


def linen(q: Any, k: Any, v: Any) -> Any:
    return nn.dot_product_attention(q, k, v)


def with_dropout(q: Any, k: Any, v: Any) -> Any:
    return nn.dot_product_attention(
        q, k, v, dropout_rate=0.1, dropout_rng=jax.random.key(0), deterministic=False
    )


def sloped(q: Any, k: Any, v: Any) -> Any:
    far = (jnp.arange(T)[None] - jnp.arange(T)[:, None]).astype(jnp.float32)
    slopes = jnp.asarray([0.5, 0.25])
    return weighted(scores(q, k) + slopes[:, None, None] * far, v)


def sigmoid(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", jax.nn.sigmoid(scores(q, k)), v)


ATTENTIONS = [causal, window, capped, grouped, linen, with_dropout, sloped, sigmoid]


def gradients(attention: Callable[..., Any]) -> Callable[..., Any]:
    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return jnp.mean(jnp.sin(attention(q, k, v)) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    return step


def largest(function: Callable[..., Any], args: Any) -> int:
    """Bytes of the largest value that any operation makes."""

    def of(jaxpr: Any) -> int:
        sizes = [0]
        for eqn in compat.body(jaxpr).eqns:
            sizes += [nbytes(v.aval) for v in eqn.outvars]
            for value in eqn.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    sizes.append(of(value))
        return max(sizes)

    return of(jax.make_jaxpr(function)(*args))


@pytest.mark.long
@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda f: f.__name__)
def test_attention_is_equal_and_its_scores_are_never_whole(attention: Any) -> None:
    args = tuple(normal(B, T, H, D) + k for k in range(3))
    step = gradients(attention)
    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert len(lines) == 1 and "64 rows of 64 in 8 chunks" in lines[0]
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    if attention is not with_dropout:  # the random bits are drawn whole
        assert largest(made, args) < largest(step, args) / 2


@pytest.mark.long
@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda f: f.__name__)
def test_chunks_of_tiles_of_rows_are_equal(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.chunks.rewrite.TILE", 4)
    monkeypatch.setattr("planner.chunks.rewrite.OCCUPY", B * H)
    cuts = []

    def cut(rows: int, parts: int, piece: int) -> Cut:
        cuts.append((rows, parts, piece))
        return Cut(rows, parts, piece)

    monkeypatch.setattr("planner.chunks.rewrite.Cut", cut)
    args = tuple(normal(B, T, H, D) + k for k in range(3))
    step = gradients(attention)
    made, _ = chunked(step, trace(step, args), args, PARTS)
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    assert set(cuts) == {(T, PARTS, 4)}


@pytest.mark.parametrize("piece", [1, 2, 4, 8])
def test_rows_of_chunks(piece: int) -> None:
    cut = Cut(24 * 3, 3 * 3, piece)
    x = jnp.arange(5 * 72).reshape(5, 72) % 72
    chunks = cut.apart(x, 1)
    assert chunks.shape == (9, 5, 8)
    assert jnp.array_equal(cut.joined(chunks, 1), x)
    for number, chunk in enumerate(chunks):
        assert jnp.array_equal(cut.positions(jnp.arange(8), jnp.int32(number)), chunk[0])
        assert chunk[0, 0] == number * piece


@pytest.mark.parametrize("microbatches", [1, 2])
def test_masks_in_scans_are_made_chunk_by_chunk_in_microbatches_too(microbatches: int) -> None:
    """Masks are computed outside of both loops, from literals."""

    def step(ws: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return causal(h @ w, h, h) + h, None

        def loss(ws: Any) -> Any:
            return jnp.mean(jnp.sin(jax.lax.scan(layer, x, ws)[0]))

        return ws - jax.grad(loss)(ws)

    args = normal(3, D, D), normal(B, T, H, D)
    plain = rewritten(step, args, Recipe(microbatches=microbatches))
    made = rewritten(step, args, Recipe(microbatches=microbatches, chunks=PARTS))
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    assert largest(made, args) <= largest(plain, args) / PARTS


@pytest.mark.parametrize("microbatches", [1, 2])
def test_logits_take_one_loop_in_microbatches_too(microbatches: int) -> None:
    """The gradient of a mean is a constant, computed before the microbatches."""

    def step(w: Any, h: Any, labels: Any) -> Any:
        return w - jax.grad(lambda w: cross_entropy(jnp.sin(h), w, labels))(w)

    args = normal(8, 256), normal(32, 64, 8), jnp.arange(32 * 64).reshape(32, 64) % 256
    made = rewritten(step, args, Recipe(microbatches=microbatches, chunks=PARTS))
    assert [line.endswith("in 1 loop") for line in made.chunked] == [True]
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6


def cross_entropy(h: Any, w: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, labels).mean()


def one_hot_loss(h: Any, w: Any, labels: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(h @ w) * jax.nn.one_hot(labels, 256))


@pytest.mark.long
@pytest.mark.parametrize("loss", [cross_entropy, one_hot_loss])
def test_logits_are_equal_and_never_whole(loss: Any) -> None:
    args = normal(512, 8), normal(8, 256), jnp.arange(512) % 256
    step = jax.value_and_grad(loss, argnums=(0, 1))
    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert len(lines) == 1 and "512 rows of 256" in lines[0]
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    assert largest(made, args) < largest(step, args) / 4


def contrastive(a: Any, b: Any) -> Any:
    """Softmax along rows and along columns: no row can do without the others."""
    logits = a @ b.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)))


def running(a: Any, b: Any) -> Any:
    """Sums along both ways."""
    return jnp.mean(jnp.cumsum(jnp.cumsum(a @ b.T, 0), 1) ** 2)


def squared(a: Any, b: Any) -> Any:
    """The product of the scores with themselves: rows meet columns."""
    logits = jnp.tanh(a @ b.T)
    return jnp.mean((logits @ logits) ** 2)


@pytest.mark.long
@pytest.mark.parametrize("loss", [contrastive, running, squared])
def test_rows_that_need_each_other_are_left_whole(loss: Any) -> None:
    args = normal(64, 4), normal(64, 4) + 1
    step = jax.value_and_grad(loss, argnums=(0, 1))
    made, _ = chunked(step, trace(step, args), args, PARTS)
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6


def test_what_leaves_is_not_as_large_as_what_is_held() -> None:
    """The gradient of a bias of the scores' shape: chunks would not free anything."""
    bias = normal(B, H, T, T)
    args = (*(normal(B, T, H, D) + k for k in range(3)), bias)

    def step(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(weighted(scores(a[0], a[1]) + a[3], a[2]) ** 2), 3)(
            q, k, v, bias
        )

    assert chunked(step, trace(step, args), args, PARTS)[1] == ()


def normalized(a: Any, b: Any) -> Any:
    """A graph's adjacency by the degrees of both its ends; rows and columns are equally many."""
    near = jax.nn.relu(a @ b.T)
    degrees = 1.0 + near.sum(0) * near.sum(1)
    return jnp.mean(jnp.sin((near / degrees[:, None]) @ b))


def counted(a: Any, b: Any) -> Any:
    """One array of positions, of rows and of columns."""
    near = jnp.tanh(a @ b.T)
    places = jax.lax.iota(a.dtype, 64)
    near += jax.lax.broadcast_in_dim(places, (64, 64), (1,))
    mean = near.sum(1) * places
    return jnp.mean(jnp.sin((near / (1.0 + mean[:, None] ** 2)) @ b))


@pytest.mark.long
@pytest.mark.parametrize("loss", [normalized, counted])
def test_a_vector_of_columns_is_none_of_rows(loss: Any) -> None:
    with jax.enable_x64(True):
        args = normal(64, 4).astype(float), normal(64, 4).astype(float) + 1
        step = jax.value_and_grad(loss, argnums=(0, 1))
        made, lines = chunked(step, trace(step, args), args, PARTS)
        assert lines and largest(made, args) < largest(step, args) / 4
        assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 1e-12


@pytest.mark.long
def test_a_jitted_attention_is_in_chunks_wherever_it_is_called() -> None:
    """All calls share their equations."""
    args = tuple(normal(B, T, H, D) + k for k in range(3))
    layer = jax.jit(causal)

    def step(q: Any, k: Any, v: Any) -> Any:
        return layer(layer(layer(q, k, v), k, v), k, v)

    made, _ = chunked(step, trace(step, args), args, PARTS)
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    assert largest(made, args) < largest(step, args) / 2


@pytest.mark.long
def test_a_deep_program_in_front_of_a_scan() -> None:
    args = normal(64, 4), normal(64, 4) + 1

    def step(a: Any, b: Any) -> Any:
        deep = a[0, 0]
        for _ in range(1200):
            deep = jnp.sin(deep)
        return jax.lax.scan(lambda c, _: (jax.nn.softmax(c @ b.T + deep) @ b, None), a, None, 2)[0]

    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert lines and difference(made(*args), step(*args)) <= 5e-6


@pytest.mark.long
def test_positions_of_rows_are_rounded_as_those_of_columns() -> None:
    """bfloat16 can't count to 700."""
    args = normal(700, 4), normal(700, 4) + 1

    def step(a: Any, b: Any) -> Any:
        row, column = (jax.lax.broadcasted_iota(jnp.bfloat16, (700, 700), d) for d in (0, 1))
        return jax.nn.softmax(jnp.where(row >= column, a @ b.T, -1e9)) @ b

    made, lines = chunked(step, trace(step, args), args, 7)
    assert lines and difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16])
def test_short_types_are_added_up_in_a_wide_one(dtype: Any) -> None:
    args = normal(64, 4), normal(64, 4) + 1

    def step(a: Any, b: Any) -> Any:
        kept = jnp.tanh(a @ b.T).astype(dtype)
        sums = jnp.einsum("ij,ik->jk", kept, a.astype(dtype), preferred_element_type=dtype)
        return sums.astype(jnp.float32)

    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert lines and made(*args).dtype == jnp.float32
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 0.07


@pytest.mark.long
def test_effects_stay_in_order() -> None:
    """What is added to a reference depends on a loop; what reads it later does not."""
    args = normal(64, 4), normal(64, 4) + 1
    printed: list[float] = []

    def step(a: Any, b: Any) -> Any:
        near = jnp.tanh(a @ b.T)
        rows = near.sum(1)
        total = jax.new_ref(jnp.zeros(()))
        total[...] += rows.sum()
        seen = total[...]
        total[...] = a.sum()
        jax.debug.callback(lambda x: printed.append(float(x)), 0.0 * rows[0], ordered=True)
        jax.debug.callback(lambda x: printed.append(1.0 + float(x)), 0.0 * a[0, 0], ordered=True)
        return jnp.sin((near / (1.0 + rows[:, None] ** 2)) @ b), seen, total[...]

    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert lines and difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    jax.effects_barrier()
    assert printed == [0.0, 1.0, 0.0, 1.0]


def test_an_effect_between_two_loops() -> None:
    """Its result enters the region again, and waits for an effect that waits for the region."""
    args = normal(64, 4), normal(64, 4) + 1

    def step(a: Any, b: Any) -> Any:
        near = jnp.tanh(a @ b.T)
        cell = jax.new_ref(jnp.ones(()))
        cell[...] += near.sum(1)[0] ** 2
        return jnp.sin((near / cell[...]) @ b)

    made, lines = chunked(step, trace(step, args), args, PARTS)
    assert "2 loops" in lines[0]
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6


def random_loss(draw: random.Random) -> Callable[..., Any]:
    """A loss of two matrices whose product is changed, reduced and multiplied at random."""
    unary = [jnp.tanh, jnp.sin, lambda x: 0.5 * x, lambda x: x * x, jax.nn.sigmoid, jnp.abs]
    plan = [(draw.randrange(11), draw.randrange(100), draw.randrange(100)) for _ in range(7)]

    def loss(a: Any, b: Any, c: Any) -> Any:
        known = [a @ b.T]
        out = 0.0
        for kind, i, j in plan:
            x, axis = known[i % len(known)], j % 2
            if kind < 4:
                known.append(unary[(i + j) % len(unary)](x))
            elif kind == 4:
                known.append(x - jnp.max(x, axis, keepdims=True))
            elif kind == 5:
                known.append(x / (1.0 + jnp.sum(x * x, axis, keepdims=True)))
            elif kind == 6:
                known.append(jax.nn.softmax(x, axis))
            elif kind == 7:
                known.append(x + known[j % len(known)])
            elif kind == 8:
                known.append(jnp.where(jnp.arange(64)[:, None] >= jnp.arange(64), x, 0.1))
            elif kind == 9:
                out += jnp.mean(jnp.sin((x if j % 3 else x.T) @ c))
            else:
                out += jnp.mean(jnp.sum(x, axis) ** 2)
        return out + jnp.mean(jnp.sin(known[-1] @ c))

    return loss


def random_case(seed: int) -> bool:
    """Whether a random step is done in chunks; its results are equal either way."""
    step = jax.value_and_grad(random_loss(random.Random(seed)), argnums=(0, 1, 2))
    with jax.enable_x64(True):
        args = tuple(x.astype(float) for x in (normal(64, 4), normal(64, 4) + 0.5, normal(64, 3)))
        made, lines = chunked(step, trace(step, args), args, PARTS)
        assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 1e-12, seed
    return bool(lines)


@pytest.mark.long
def test_random_steps() -> None:
    assert 5 <= sum(random_case(seed) for seed in range(25)) <= 23


@pytest.mark.slow
def test_many_random_steps() -> None:
    assert 100 <= sum(random_case(seed) for seed in range(25, 525)) <= 450


LAYERS = 3


def layered(params: Any, x: Any, outer: Callable[[Any], Any] = lambda out: out) -> Any:
    """A scan of attention layers, trained by plain gradient descent."""

    def layer(h: Any, w: Any) -> Any:
        q, k, v = (jnp.einsum("btc,chd->bthd", h, w[n]) for n in range(3))
        return h + outer(causal(q, k, v)).reshape(h.shape), None

    def loss(p: Any) -> Any:
        return jnp.mean(jnp.sin(jax.lax.scan(layer, x, p)[0]))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "64"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_scan_with_chunks_computes_its_scores_again(remat: str, parts: int) -> None:
    """Also under the policy that computes nothing else again: scores do not wait."""
    args = 0.3 * normal(LAYERS, 3, H * D, H, D), normal(B, T, H * D)
    step = rewritten(layered, args, Recipe(parts, remat, 8))
    assert difference(jax.jit(step)(*args), jax.jit(layered)(*args)) <= 5e-6
    assert largest(step, args) < largest(layered, args) / 4


def loops_of(function: Callable[..., Any], args: Any, length: int) -> int:
    """How many loops of a length a function holds."""

    def of(jaxpr: Any) -> int:
        found = 0
        for eqn in compat.body(jaxpr).eqns:
            found += eqn.primitive.name == "scan" and eqn.params["length"] == length
            found += sum(of(v) for v in eqn.params.values() if hasattr(v, "jaxpr"))
        return found

    return of(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize("remat", ["none", "64", "full"])
def test_the_output_of_attention_is_kept_where_it_would_take_a_loop_again(remat: str) -> None:
    """The backward pass has a loop of its own, in which scores are made again on the way. Only
    where the output is done again, too, does it need the forward pass's loop before it."""
    bent = functools.partial(layered, outer=jnp.sin)  # its gradient reads the output
    args = 0.3 * normal(LAYERS, 3, H * D, H, D), normal(B, T, H * D)
    step: Any = rewritten(bent, args, Recipe(1, remat, 8))
    assert loops_of(step, args, 8) == (3 if remat == "full" else 2)
    assert difference(jax.jit(step)(*args), jax.jit(bent)(*args)) <= 5e-6


def test_sums_of_a_softmax_are_not_kept_in_a_form_that_takes_two_loops() -> None:
    """They are made on the way; what others read of a region is not."""
    args = 0.3 * normal(3, H * D, H, D), normal(B, T, H * D)

    def forward(w: Any, h: Any) -> Any:
        q, k, v = (jnp.einsum("btc,chd->bthd", h, w[n]) for n in range(3))
        return jnp.sin(causal(q, k, v).reshape(h.shape))

    flat = trace(forward, args).flat.live()
    found = in_chunks(flat)
    kinds = {v: c.kind for c in flat.calls for v in c.outs}
    leaving = [[kinds[v] for v in loop.leaving] for loop in found.loops]
    assert leaving == [["dot_general"], ["reduce_sum"]]
    assert found.loops[0].flop > found.loops[1].flop > 0
    assert found.loops[1].leaving <= found.values
    assert not found.loops[0].leaving & found.values


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_layers_that_the_program_rematerializes(policy: Any) -> None:
    """Scores are made chunk by chunk in bodies of ``jax.checkpoint``, too, masks with them."""
    mask = jnp.tril(jnp.ones((T, T), bool))

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(h: Any, w: Any) -> Any:
        q, k, v = (jnp.einsum("btc,chd->bthd", h, w[n]) for n in range(3))
        seen = jnp.where(mask, scores(q, k), -1e30)
        return h + weighted(seen, v).reshape(h.shape)

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(jnp.sin(functools.reduce(layer, p, x)))

        return jax.value_and_grad(loss)(params)

    args = 0.3 * normal(LAYERS, 3, H * D, H, D), normal(B, T, H * D)
    made, lines = chunked(step, trace(step, args), args, 8)
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 5e-6
    assert lines or policy is not None  # scores that its policy keeps leave the body whole
    assert policy is not None or largest(made, args) < largest(step, args) / 4


@pytest.mark.long
def test_the_search_takes_chunks_where_scores_do_not_fit() -> None:
    shapes = (
        jax.ShapeDtypeStruct((LAYERS, 3, H * D, H, D), jnp.float32),
        jax.ShapeDtypeStruct((B, 256, H * D), jnp.float32),
    )
    options: dict[str, Any] = {"cluster": "v5e:2x2", "mesh": "data=4"}
    whole = plan_step(layered, *shapes, **options).plan
    only: dict[str, Any] = {"microbatches": 1, "remat": "none"}
    tight = plan_step(layered, *shapes, **options, **only, memory=3e6).plan
    assert whole.chunks == 1 and whole.prediction.peak_bytes > 4e6
    assert tight.chunks > 1 and tight.prediction.peak_bytes <= 3e6
    assert any(name == "chunks" and "256 rows of 256" in text for name, text in recipe_lines(tight))
    assert plan_from_json(tight.to_json()) == tight


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True])
def test_a_number_of_chunks_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"chunks=.*expected a whole number from 1 on, or auto"):
        plan_step(layered, normal(1), normal(1), cluster="v5e:2x2", chunks=value)
