"""The rule of any equation of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from planner.rules import registry
from planner.rules.key import EqnKey
from planner.rules.registry import RuleBook, rules_for


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def eqns_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, with those of the calls in it."""
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
        if inner and not eqn.primitive.name.startswith(("scatter", "reduce", "select_and")):
            for sub in inner:
                yield from eqns_of(getattr(sub, "jaxpr", sub))
        else:
            yield eqn


def keys_of(function: Callable[..., Any], *args: Any) -> list[EqnKey]:
    return [EqnKey.of(eqn) for eqn in eqns_of(jax.make_jaxpr(function)(*args).jaxpr)]


def network(table: Any, w: Any, v: Any, ids: Any, labels: Any) -> Any:
    """A small attention layer with a loss."""
    x = jnp.take(table, ids, axis=0)
    q = (x @ w).reshape(2, 6, 4, 4).transpose(0, 2, 1, 3)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, q)
    mask = jnp.tril(jnp.ones((6, 6), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    y = jnp.einsum("bhts,bhsd->bthd", weights, q).reshape(2, 6, 16)
    logits = jax.nn.gelu(y) @ v
    return -jnp.mean(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10))


NETWORK = (f32(32, 16), f32(16, 16), f32(16, 10), i32(2, 6), i32(2, 6))


def test_a_training_step_has_no_opaque_equation() -> None:
    keys = keys_of(jax.value_and_grad(network, argnums=(0, 1, 2)), *NETWORK)
    book = RuleBook()
    rules = book.rules_for(keys)
    for key, rule in zip(keys, rules, strict=True):
        rule.verify(key.in_shapes, key.out_shapes)
    assert {key.name for key, r in zip(keys, rules, strict=True) if r.origin == "opaque"} == set()
    assert {"elementwise", "shardy"} <= {rule.origin for rule in rules}


def test_without_shardy_the_same_step_is_covered() -> None:
    keys = keys_of(network, *NETWORK)
    rules = RuleBook(use_shardy=False).rules_for(keys)
    assert {rule.origin for rule in rules} <= {"elementwise", "fallback"}
    for key, rule in zip(keys, rules, strict=True):
        rule.verify(key.in_shapes, key.out_shapes)


def test_rules_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = registry.read_rules

    def counting(items: Any) -> Any:
        asked.append(len(items))
        return read(items)

    monkeypatch.setattr(registry, "read_rules", counting)
    keys = keys_of(jnp.dot, f32(6, 8), f32(8, 4)) * 3
    book = RuleBook()
    first = book.rules_for(keys)
    assert book.rules_for(keys) == first
    assert sum(asked) == 1


def test_same_shapes_with_other_params_differ() -> None:
    a = f32(8, 8)
    keys = keys_of(lambda x: (lax.cumsum(x, 0), lax.cumsum(x, 1)), a)
    first, second = rules_for(keys)
    assert (first.replicated, second.replicated) == ({0}, {1})


def test_softmax_and_one_hot() -> None:
    rules = rules_for(keys_of(lambda a: jax.nn.softmax(a), f32(6, 8)))
    assert all(0 in rule.shardable for rule in rules if rule.sizes)
    assert any(rule.reduction for rule in rules)
    texts = [str(rule) for rule in rules_for(keys_of(lambda n: jax.nn.one_hot(n, 10), i32(3)))]
    assert "([i, 1], [1, j])->([i, j]) {i=3, j=10}" in texts or (
        "([i, j], [i, j])->([i, j]) {i=3, j=10}" in texts
    )


def test_linear_algebra_shards_batches_only() -> None:
    keys = keys_of(jnp.linalg.eigh, f32(3, 4, 4))
    rule = next(r for k, r in zip(keys, rules_for(keys), strict=True) if k.name == "eigh")
    assert rule.shardable == {0}


def odd(size: int) -> list[EqnKey]:
    """Equations that are unusual in one way or another."""
    key = jax.ShapeDtypeStruct((size,), jax.random.key(0).dtype)
    found = keys_of(lambda k: jax.vmap(jax.random.bits)(k), key)
    found += keys_of(lambda k: jax.random.key_data(k), key)
    found += keys_of(lambda k: jax.random.normal(jax.random.wrap_key_data(k), (4, size)), u32(2))
    found += keys_of(lambda a: jnp.concatenate([a, a], 1), f32(0, size))
    found += keys_of(lambda a: a.T @ a, f32(0, size))
    found += keys_of(lambda a: a.reshape(-1), f32(0, size))
    found += keys_of(lambda: jnp.arange(size))
    found += keys_of(lambda a: jax.debug.print("{}", a), f32(size))
    found += keys_of(lambda a: jax.pure_callback(lambda x: x, f32(size), a), f32(size))
    found += keys_of(lambda a: jnp.linalg.svd(a), f32(size, size))
    found += [EqnKey.of(e) for e in scan_eqns(size)]
    found += keys_of(lambda a: lax.bitcast_convert_type(a, jnp.uint8), f32(size))
    found += keys_of(lambda a: lax.random_gamma_grad(a, a), f32(size))
    return found


def scan_eqns(size: int) -> Any:
    def function(a: Any) -> Any:
        return lax.scan(lambda c, x: (c + x, c), a[0], a)

    return jax.make_jaxpr(function)(f32(size, size)).jaxpr.eqns


@pytest.mark.parametrize("size", [1, 5])
def test_odd_equations_do_not_crash(size: int) -> None:
    keys = odd(size)
    for key, rule in zip(keys, rules_for(keys), strict=True):
        rule.verify(key.in_shapes, key.out_shapes)
        if key.name in ("scan", "pure_callback", "debug_callback", "debug_print"):
            assert rule.origin == "opaque"


def test_values_without_shape_count_as_scalars() -> None:
    primitive = keys_of(lambda a: lax.tanh(a), f32(3))[0].primitive
    rule = RuleBook().rules_for([EqnKey(primitive, {}, (object(),), (object(),))])[0]
    assert str(rule) == "([])->([])"


def test_no_items() -> None:
    assert rules_for([]) == []
