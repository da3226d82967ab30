"""Every kind of leaf comes back bit for bit, under every name, from any mesh to any other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from executor import CheckpointError, Checkpoints
from executor.checkpoint.common import nested, path_text, stored, taken, unstored
from executor.checkpoint.leaves import _twice, check_holders

pytestmark = pytest.mark.devices


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_pytree_with_keys_class
class Twice:
    """A container that calls both of its leaves x."""

    def __init__(self, *leaves: Any) -> None:
        self.leaves = leaves

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey("x"), leaf) for leaf in self.leaves], None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
        return cls(*leaves)


def same_bits(a: Any, b: Any) -> None:
    x, y = np.asarray(a), np.asarray(b)
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert x.tobytes() == y.tobytes()


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(same_bits, a, b)


def there_and_back(folder: Path, state: Any, **options: Any) -> Any:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, state)
        checkpoints.wait()
        return checkpoints.restore(state, **options)


NAN = np.array([0x7FC12345, 0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
STATES = {
    "nan payloads": {"a": NAN, "b": NAN.repeat(2).view(np.float64)},
    "small types": {
        str(d): np.arange(8).astype(d)
        for d in (
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
            np.float16,
            np.int8,
            np.int16,
            np.uint32,
            np.bool_,
        )
    },
    "four bits": {"a": jnp.arange(-8, 8, dtype=jnp.int4)},
    "64 bits": {"a": np.array([2**53 + 1, -1]), "b": np.array([0.1, 1 / 3])},
    "numbers": {"a": 3, "b": 2.5, "c": True, "d": 2**60 + 1, "e": np.float32(0.1), "f": 1j},
    "none and empty": {"a": None, "b": jnp.zeros((0, 3)), "c": {}, "d": [None, jnp.ones(2), ()]},
    "dots": {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "a/b": jnp.full(2, 2.0), "a~1b": NAN},
    "containers": Pair([jnp.ones(1), (jnp.zeros(2),)], {0: jnp.ones(3), 1: jnp.zeros(3)}),
}


@pytest.mark.parametrize("name", STATES)
def test_leaves_of_every_kind(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    found = there_and_back(tmp_path, state)
    same(found, state)
    for got, had in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        if isinstance(had, bool | int | float | complex):
            assert type(got) is type(had) and got == had


def test_typed_keys_come_back_as_keys_of_the_kind_asked_for(tmp_path: Path) -> None:
    state = {"one": jax.random.key(3), "four": jax.random.split(jax.random.key(4, impl="rbg"), 4)}
    found = there_and_back(tmp_path, state)
    for name, key in state.items():
        assert found[name].dtype == key.dtype
        same_bits(jax.random.key_data(found[name]), jax.random.key_data(key))
    with Checkpoints(tmp_path) as checkpoints:
        raw = checkpoints.restore({"one": np.zeros(2, np.uint32)}, partial=True)
        same_bits(raw["one"], jax.random.key_data(state["one"]))
        with pytest.raises(CheckpointError, match=r"one was saved as uint32\[2\], expected uint32"):
            checkpoints.restore({"one": jax.random.key(0, impl="rbg")}, partial=True)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": "text", "b": jnp.ones(2)}, "a is no array but str"),
        ({"a": {"b": object()}}, "a/b is no array but object"),
        ({"a": np.array(["x"])}, "a is no array but ndarray"),
        (jnp.ones(3), "a state is a container"),
        ({"a": {}}, "a state is a container"),
        (Twice(jnp.ones(2), jnp.ones(2)), "two leaves are called x"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: Any, text: str) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=text):
            checkpoints.save(0, state)
        assert checkpoints.steps == ()


KEYS = st.text(st.sampled_from("ab~/.01"), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=4), st.sampled_from("/."))
def test_names_are_taken_apart_as_they_were_joined(path: list[str], separator: str) -> None:
    assert taken(path_text(tuple(path), separator), separator) == tuple(path)
    given = [stored(k) for k in path]
    assert [unstored(k) for k in given] == path
    assert not any("." in k or "/" in k for k in given)


def test_nested_refuses_a_leaf_within_a_leaf() -> None:
    assert nested({("a", "0"): 1, ("a", "2"): 2}, [("a",)]) == {"a": [1, None, 2]}
    with pytest.raises(CheckpointError, match="a is a leaf, so a/b can't be in it"):
        nested({("a",): 1, ("a", "b"): 2})
    with pytest.raises(CheckpointError, match="a is a leaf, and has leaves in it"):
        nested({("a", "b"): 1, ("a",): 2})


def mesh_of(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    names = ("a", "b", "c")[: len(sizes)]
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


@st.composite
def placements(draw: Any, shape: tuple[int, ...]) -> NamedSharding:
    """A mesh, and a spec that it divides."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (6,), (8,), (2, 2), (2, 3), (2, 2, 2)]))
    mesh = mesh_of(sizes)
    left = list(draw(st.permutations(mesh.axis_names)))
    spec: list[Any] = []
    for n in shape:
        here: list[str] = []
        while left and draw(st.booleans()):
            axes = [*here, left[0]]
            if n % int(np.prod([mesh.shape[a] for a in axes])):
                break
            here = [*here, left.pop(0)]
        spec.append(tuple(here) or None)
    return NamedSharding(mesh, P(*spec))


SHAPES = ((24, 12), (6,), (4, 3, 8), (), (5, 7))
DTYPES = ("float32", "bfloat16", "int8", "uint32", "float8_e4m3fn", "bool")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_mesh_to_any_other_bit_for_bit(tmp_path_factory: Any, data: Any) -> None:
    state, to = {}, {}
    for k, shape in enumerate(data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))):
        dtype = jnp.dtype(data.draw(st.sampled_from(DTYPES)))
        raw = np.random.default_rng(k).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        array = raw.view(dtype).reshape(shape) if dtype.name != "bool" else raw[..., 0] % 2 == 0
        state[f"x{k}"] = jax.device_put(array, data.draw(placements(shape)))
        to[f"x{k}"] = data.draw(placements(shape))
    found = there_and_back(tmp_path_factory.mktemp("run"), state, shardings=to)
    same(found, state)
    for name, sharding in to.items():
        assert found[name].sharding == sharding


def test_a_state_that_is_given_away_at_once_is_saved_as_it_was(tmp_path: Path) -> None:
    """A step that donates writes its results where the state was while the save is under way."""
    mesh = mesh_of((8,))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {
        f"w{k}": jax.device_put(
            np.full((1024, 1024), k, np.float32), NamedSharding(mesh, P("a") if k % 2 else P())
        )
        for k in range(8)
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(20):
            state = step(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        found = checkpoints.restore(state)
    for k in range(8):
        np.testing.assert_array_equal(np.asarray(found[f"w{k}"]), k)


def test_a_checkpoint_that_orbax_wrote_by_itself(tmp_path: Path) -> None:
    state = {"layers": [{"w": jnp.ones((4, 4))}, {"w": jnp.zeros((4, 4))}], "n": jnp.int32(3)}
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    with Checkpoints(tmp_path) as checkpoints:
        same(checkpoints.restore(state), state)
        assert checkpoints.shapes()["layers"][1]["w"].shape == (4, 4)
        only = checkpoints.restore({"layers": [{"w": state["layers"][0]["w"]}]}, partial=True)
        same_bits(only["layers"][0]["w"], np.ones((4, 4), np.float32))
        assert (checkpoints.plan(), checkpoints.extra()) == (None, None)


def test_orbax_reads_by_itself_what_is_written_here(tmp_path: Path) -> None:
    state = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": [jnp.ones(2, jnp.bfloat16)]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(tmp_path / "0" / "state")
    same_bits(found["a"]["w"], state["a"]["w"])
    same_bits(found["b"]["0"], state["b"][0])


@pytest.mark.parametrize("how", ["cut", "gone", "rubbish"])
def test_the_damaged_leaf_is_named(tmp_path: Path, how: str) -> None:
    big = np.arange(2**18, dtype=np.float32)
    state = {"good": jnp.ones(4), "layers": [{"bad": big}]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        checkpoints.wait()
        files = [f for f in (tmp_path / "0" / "state").rglob("*") if f.parent.name == "d"]
        data = max(files, key=lambda f: f.stat().st_size)
        assert data.stat().st_size >= big.nbytes
        if how == "gone":
            data.unlink()
        else:
            data.write_bytes(data.read_bytes()[: big.nbytes // 2] if how == "cut" else b"rubbish")
        with pytest.raises(CheckpointError, match="leaf layers/0/bad is damaged or missing"):
            checkpoints.restore(state)


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
    small = tmp_path / "disk"
    small.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small])
    if made.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        state = {"a": jnp.arange(2**18, dtype=jnp.float32)}
        with Checkpoints(small / "run") as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            with pytest.raises(CheckpointError, match=r"(?i)no space left|ENOSPC"):
                checkpoints.save(2, {"a": jnp.ones(2**22, jnp.float32)})
                checkpoints.wait()
            assert checkpoints.steps == (1,)
            same(checkpoints.restore(state), state)
        with Checkpoints(small / "run") as again:
            assert again.steps == (1,)
            same(again.restore(state), state)
            again.save(3, state)  # what the failed one left is gone, there is room
            again.wait()
            assert again.steps == (1, 3)
    finally:
        subprocess.run(["umount", small], check=True)


def test_arrays_that_two_processes_have_apart_are_named() -> None:
    assert _twice([["w", "b"], ["n", "b"], []]) == ["b"]
    assert _twice([["w"], ["b"]]) == []
    check_holders({("w",): jnp.zeros(2)})  # one process: nobody to compare with
