"""What is pushed arrives in the end, in the bytes that were promised, and NaN is never hidden."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from executor.parameter_server import Counts, ParameterServer, Rule, train
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.transport.codec import BLOCK, KINDS, PIECE, coded, decode, encode
from planner.errors import RequestError

FLOATS = ("float64", "float32", "float16", "bfloat16")


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(FLOATS),
    st.sampled_from([1, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, PIECE + 7]),
    st.integers(0, 10**6),
    st.integers(-30, 4),
)
def test_what_is_pushed_arrives_but_for_one_remainder(
    kind: str, dtype: str, size: int, seed: int, exponent: int
) -> None:
    if not coded(dtype, kind):
        return
    draw = np.random.default_rng(seed)
    pushes = [
        (draw.normal(size=size) * draw.choice([0, 1, 1e3], size) * 2.0**exponent).astype(
            np.dtype(dtype)
        )
        for _ in range(5)
    ]
    most = float(np.abs(pushes).astype(np.float64).max())
    assume(3 * most < float(jnp.finfo(pushes[0].dtype).max))  # a sum past that saturates
    residual, arrived = None, np.zeros(size)
    for push in pushes:
        before = residual
        message, residual = encode(kind, push, residual)
        arrives = decode(message)
        assert arrives.dtype == push.dtype and arrives.shape == push.shape
        arrived += arrives.astype(np.float64)
        again, same = encode(kind, push, before)  # nothing was changed in place
        np.testing.assert_array_equal(again.codes, message.codes)
        np.testing.assert_array_equal(same, residual)
    assert residual is not None and np.isfinite(residual).all()
    total = np.sum([p.astype(np.float64) for p in pushes], axis=0)
    size_of = np.abs(pushes).astype(np.float64).max()
    unit = float(np.finfo(residual.dtype).eps)
    # a rounding of the sum with the remainder and one of the difference for every push
    np.testing.assert_allclose(arrived + residual, total, rtol=0, atol=40 * unit * size_of)


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_takes_off_a_part_of_the_norm(kind: str) -> None:
    """What the proof of error feedback asks for, whatever the values' size and spread."""
    draw = np.random.default_rng(1)
    spread = {draw.normal: 0.25, draw.laplace: 0.35, draw.standard_cauchy: 0.99}
    for scale in (1e-30, 1e-4, 1.0, 1e30):
        for values, most in spread.items():
            x = (scale * values(size=5000)).astype(np.float32)
            _, left = encode(kind, x, None)
            squares = [np.square(y.astype(np.float64)).sum() for y in (left, x)]
            assert squares[0] < most * squares[1]


@pytest.mark.parametrize(
    ("kind", "smaller"), [("bf16", 2), ("int8", 4 / (1 + 4 / 1024)), ("2bit", 16 / (1 + 16 / 1024))]
)
def test_bytes(kind: str, smaller: float) -> None:
    x = np.random.default_rng(2).normal(size=100 * BLOCK).astype(np.float32)
    message, left = encode(kind, x, None)
    assert x.nbytes / message.nbytes == pytest.approx(smaller, rel=1e-12)
    assert left.nbytes == x.nbytes


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_arrives_and_spoils_nothing(kind: str, dtype: str) -> None:
    if not coded(dtype, kind):
        return
    clean = np.random.default_rng(3).normal(size=PIECE + 50).astype(np.dtype(dtype))
    x, odd = clean.copy(), {3: np.nan, 5: -np.inf, BLOCK: np.inf, PIECE + 49: np.nan}
    for place, value in odd.items():
        x[place], clean[place] = value, 0
    message, left = encode(kind, x, None)
    expected = decode(encode(kind, clean, None)[0])
    expected[list(odd)] = list(odd.values())
    np.testing.assert_array_equal(decode(message).astype(np.float64), expected.astype(np.float64))
    assert np.isfinite(left).all() and not left[list(odd)].any()
    large = np.full(BLOCK, float(ml_dtypes.finfo(x.dtype).max), x.dtype)
    _, left = encode(kind, clean[:BLOCK], None)
    for value in (large, -large):
        message, left = encode(kind, value, left)
        assert np.isfinite(left).all()
        np.testing.assert_allclose(decode(message), value, rtol=0.01)


def test_extremes_of_two_bits() -> None:
    zeros = np.zeros(10, np.float32)
    message, left = encode("2bit", zeros, None)
    assert not decode(message).any() and not left.any()
    same = np.array([2, -2, 2, 2, -2], np.float32)
    message, left = encode("2bit", same, None)
    np.testing.assert_array_equal(decode(message), same)  # of one magnitude: nothing is lost
    tiny = np.full(10, 1e-45, np.float32)
    assert np.isfinite(decode(encode("int8", tiny, None)[0])).all()


def test_what_is_coded() -> None:
    assert [coded(d, "bf16") for d in FLOATS] == [True, True, False, False]
    assert not any(coded(d, k) for d in ("int32", "bool", "float8_e4m3fn") for k in KINDS)
    with pytest.raises(RequestError, match="compress='4bit': expected None or one of bf16, int8"):
        train(lambda server: None, workers=1, backend="local", compress="4bit")


RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 40)).astype(np.float32)
Y = np.tanh(X @ RNG.normal(size=(40, 3))).astype(np.float32)


def test_halves_of_doubles_that_they_do_not_hold_arrive_whole() -> None:
    large = np.array([1e39, 1.0, -1e39])
    found, left = encode("bf16", large, None)
    np.testing.assert_array_equal(decode(found), large)
    np.testing.assert_array_equal(left, np.zeros(3))


def fresh() -> Any:
    draw = np.random.default_rng(4)
    return {
        "in": draw.normal(size=(40, 64)).astype(np.float32) / 7,
        "out": draw.normal(size=(64, 3)).astype(np.float32) / 8,
        "steps": np.zeros(2, np.int32),
    }


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


GRADIENT = jax.jit(jax.grad(loss, allow_int=True))


def fit(server: ParameterServer, steps: int = 120) -> None:
    params = server.init(fresh())
    rows = slice(server.rank, None, server.num_workers)
    for _ in range(steps):
        gradients = GRADIENT(params, X[rows], Y[rows])
        params = server.push_pull({**gradients, "steps": np.ones(2, np.int32)})


def split() -> optax.GradientTransformation:
    """SGD on floating-point arrays; integers are added."""

    def updates(gradients: Any, _: Any) -> Any:
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else -0.2 * x, gradients
        )

    return optax.stateless(updates)


def run(**options: Any) -> tuple[float, Any, tuple[Counts, ...]]:
    done = train(fit, workers=2, servers=2, split_bytes=4096, backend="local", **options)
    return float(loss(done.params, X, Y)), done.params, done.counts


def test_training_converges_with_few_bits() -> None:
    first = float(loss(fresh(), X, Y))
    exact, _, _ = run(optimizer=split())
    assert exact < 0.3 * first
    for kind, most in (("bf16", 1.01), ("int8", 1.02), ("2bit", 1.15)):
        found, params, counts = run(optimizer=split(), compress=kind)
        assert found < most * exact, kind
        np.testing.assert_array_equal(params["steps"], [120, 120])  # integers travel as they are
        assert all(c.updates == 120 for c in counts)
        jax.tree.map(
            np.testing.assert_array_equal, run(optimizer=split(), compress=kind)[1], params
        )


def test_a_push_sent_again_is_the_same_bytes() -> None:
    seen = []

    class Twice:
        """Servers whose first answer is lost: every push is sent twice."""

        count = 1
        shard = Shard(Rule("async"), 1, None, 1.0)

        def room(self, sizes: Any) -> None:
            return None

        def call(self, method: str, args: Any, wait_s: float, first: Any = None) -> list[Any]:
            if method == "push":
                message = args[0][2].coded["float32"]
                seen.append((bytes(message.codes), bytes(message.scales)))
                self.shard.push(*args[0])
                seen.append((bytes(message.codes), bytes(message.scales)))
            return [getattr(self.shard, method)(*args[0])]

    server = ParameterServer(Twice(), 0, 1, compress="2bit")
    server.init(np.zeros(3000, np.float32))
    draw, total = np.random.default_rng(5), np.zeros(3000)
    for _ in range(4):
        push = draw.normal(size=3000).astype(np.float32)
        server.push(push)
        total += push
    assert seen[0::2] == seen[1::2] and len(set(seen)) == 4
    assert Twice.shard.counts.duplicates == 4
    left = server._calls.feedback.left[0]["float32"]  # type: ignore[union-attr]
    np.testing.assert_allclose(server.pull() + left, total, atol=1e-4)
