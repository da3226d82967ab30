"""Steps whose reports are tested, and what a report's file holds."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from planner.compare.manual_plans import Candidate, Comparison, compare
from planner.planning import Planned, plan_step

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import decoders

NASTY = "</script><script>fetch('http://example.invalid/')</script><!-- & \"'`{{data}}\u2028"


def _update(p: Any, g: Any) -> Any:
    return p - 0.1 * g


@functools.cache
def small() -> Planned:
    """Two layers and a loop, with names that are markup."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["<img src=x onerror=alert(1)>"]
            for p in params["layers"]:
                x = x + jnp.tanh(x @ p["up"]) @ p[NASTY]
            y, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["stack"])
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(_update, state, grads), value

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = [{"up": of(256, 1024), NASTY: of(1024, 256)} for _ in range(4)]
    state = {"layers": layers, "stack": of(4, 256, 256)}
    batch = {"<img src=x onerror=alert(1)>": of(4096, 256)}
    return plan_step(step, state, batch, cluster="h100:8", mesh="data=4,model=2", zero=3)


@functools.cache
def deep(layers: int) -> Planned:
    """Unrolled layers of a decoder with AdamW."""
    sizes = decoders.GPT(
        layers=layers, dim=256, heads=4, vocab=1024, batch=32, seq=128, remat=False
    )
    step, arguments = decoders.build(sizes)
    return plan_step(step, *arguments, cluster="h100:8", mesh="data=4,model=2")


@functools.cache
def compared() -> tuple[Planned, Comparison]:
    """A product of matrices beside the plans by hand; one does not fit, one is refused."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.mean(x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (1024, 512))]
    planned = plan_step(step, *shapes, cluster="h100:4")
    found = compare(step, *shapes, cluster="h100:4")
    first, second, *rest = found.candidates
    large = dataclasses.replace(second, fits=False)
    refused = Candidate("by no means", "refused", None, False, "a mark contradicts " + NASTY)
    return planned, dataclasses.replace(found, candidates=(first, large, *rest, refused))


class Page(HTMLParser):
    """Elements of a page, with their attributes and the text of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "title":
            self.title += data

    @property
    def data(self) -> dict[str, Any]:
        """The report's data."""
        kinds = [attributes.get("type") for tag, attributes in self.elements if tag == "script"]
        found: dict[str, Any] = json.loads(self.scripts[kinds.index("application/json")])
        return found
