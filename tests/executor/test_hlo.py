"""Collectives, loops and cycles read from HLO text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from executor.verify.hlo.collectives import read_module, text_counts, wire_bytes
from executor.verify.hlo.loops import trip_count
from executor.verify.hlo.text import Instruction, parse, type_bytes

pytestmark = pytest.mark.usefixtures("optimized")

LOOP = re.sub(
    r"CYCLES\((\d+)\)",
    r'{"window_config":{"estimated_cycles":"\1"}}',
    """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%wrapped (p: bf16[4,128]) -> bf16[16,128] {
  %p = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gathered = bf16[16,128]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%cond (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %bound = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%body (s.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s.1 = (s32[]{:T(128)}, f32[8,128]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %step = s32[] constant(3)
  %next = s32[] add(%i.1, %step)
  %v = f32[8,128] get-tuple-element(%s.1), index=1
  %sum = f32[8,128]{1,0} all-reduce(%v), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%region
  %work = f32[8,128]{1,0} fusion(%sum), kind=kLoop, calls=%region, backend_config=CYCLES(100)
  ROOT %out = (s32[], f32[8,128]{1,0}) tuple(%next, %work)
}

ENTRY %main (a: f32[8,128], b: bf16[4,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = bf16[4,128]{1,0} parameter(1)
  %start = s32[] constant(3)
  %copy = s32[]{:T(128)} copy(%start)
  %state = (s32[], f32[8,128]{1,0}, /*index=2*/f32[8,128]) tuple(%copy, %a)
  %loop = (s32[], f32[8,128]{1,0}) while(%state), condition=%cond, body=%body
  %ag = ((bf16[4,128]), bf16[16,128], u32[]) async-start(%b), calls=%wrapped
  %ag.1 = bf16[16,128] async-done(%ag), calls=%wrapped
  %cp = (f32[8,128], f32[8,128]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %cp.1 = f32[8,128] collective-permute-done(%cp)
  %busy = f32[8,128] fusion(%cp.1), kind=kLoop, calls=%region, backend_config=CYCLES(7)
  ROOT %result = f32[8,128]{1,0} get-tuple-element(%loop), index=1
}
""",
)


def test_loops_async_and_cycles() -> None:
    module = read_module(LOOP)
    kinds = module.by_kind()
    assert module.notes == ()
    # 3, 6, 9 are below 12: three trips of a 4096-byte all-reduce between two devices
    assert (kinds["all_reduce"].count, kinds["all_reduce"].payload_bytes) == (3, 3 * 4096)
    assert kinds["all_reduce"].wire_bytes == 3 * 4096
    assert (kinds["all_gather"].count, kinds["all_gather"].payload_bytes) == (1, 16 * 128 * 2)
    assert kinds["all_gather"].wire_bytes == 16 * 128 * 2 * 3 / 4
    assert (kinds["permute"].count, kinds["permute"].wire_bytes) == (1, 4096)
    assert module.cycles == 3 * 100 + 7


def test_known_trip_count_wins_and_unknown_loops_are_named() -> None:
    known = LOOP.replace(
        "body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}\n'
    )
    assert read_module(known).by_kind()["all_reduce"].count == 5
    unknown = LOOP.replace("direction=LT", "direction=GT")
    module = read_module(unknown)
    assert module.by_kind()["all_reduce"].count == 1
    assert module.notes == ("loop loop: trips unknown, counted once",)


def test_condition_in_a_fusion_and_bound_in_the_state() -> None:
    fused = LOOP.replace(
        "%cond (s:",
        """%compare (l: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %c = s32[] constant(6)
  ROOT %lt = pred[] compare(%l, %c), direction=LE
}

%cond (s:""",
    ).replace(
        "ROOT %less = pred[] compare(%i, %bound), direction=LT",
        "ROOT %less = pred[] fusion(%i), kind=kLoop, calls=%compare",
    )
    module = parse(fused)
    caller = module.computations[module.entry]
    assert trip_count(module.computations, caller, caller.instructions["loop"]) == 2  # 3 and 6


def test_not_hlo() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        read_module("module @jit_step {}")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true", ((0, 2), (1, 3))),
        ("replica_groups={}, to_apply=%add", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[4,2]<=[8], dimensions={0}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'c'}, x=1", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=4,'c'=2] {'a'}, x=1", ((0, 2, 4, 6), (1, 3, 5, 7))),
        (
            "replica_groups=mesh['a'=2,'d'=4], device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, x=1", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_replica_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    at = Instruction("x", "f32[8]", "all-reduce", "%y", f", channel_id=1, {text}")
    assert at.groups(8) == groups
    assert at.channel == "1"


def test_names_and_texts_do_not_look_like_attributes() -> None:
    """A scope of the user's may have any name."""
    behind = (
        ', calls=%real, frontend_attributes={note="a, calls=%no, chain_id=1"}'
        ', metadata={op_name="jit(f)/to_apply=%no/\\", index=7, calls=%no" source_line=3}'
        ', backend_config={"known_trip_count":{"n":"5"},"text":"}, calls=%no"}'
    )
    at = Instruction("x", "f32[]", "while", "%y", behind)
    assert at.callees == ("real",)
    assert (at.applied, at.index, at.chain, at.trips, at.cycles) == ("", None, "", 5, 0)


def test_counts_of_the_text() -> None:
    """Each collective once, whatever loop or branch it is in."""
    assert text_counts(LOOP) == {"all_gather": 1, "all_reduce": 1, "permute": 1}
    with pytest.raises(ValueError, match="no ENTRY"):
        text_counts("")


def test_type_bytes() -> None:
    assert type_bytes("bf16[4,128]{1,0:T(8,128)(2,1)S(1)}") == 1024
    assert type_bytes("(f32[2]{0}, s32[], /*index=2*/pred[3])") == 8 + 4 + 3
    assert type_bytes("f8e4m3fn[16]{0}") == 16
    assert type_bytes("s4[7]") == 4
    assert type_bytes("f32[<=8,2]") == 64


def test_wire_bytes() -> None:
    assert wire_bytes("all_reduce", 800, 8) == 1400
    assert wire_bytes("all_gather", 800, 8) == 700
    assert wire_bytes("permute", 800, 2) == 800
    assert wire_bytes("all_reduce", 800, 1) == 0


@pytest.mark.devices
def test_a_scan_compiled_for_eight_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        def layer(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            grown = jnp.tanh(x @ w)  # [64 split, 16]
            return w - x.T @ grown, None  # summed over data: one all-reduce of f32[16,16]

        return jax.lax.scan(layer, w, None, length=5)[0]

    jitted = jax.jit(step, in_shardings=(split, whole), out_shardings=whole)
    x, w = np.ones((64, 16), np.float32), np.ones((16, 16), np.float32)
    module = read_module(jitted.lower(x, w).compile().as_text())
    (kind,) = module.by_kind()
    (collective,) = module.collectives
    assert (kind, collective.count, collective.payload_bytes) == ("all_reduce", 5, 16 * 16 * 4)
    assert collective.groups == (tuple(range(8)),)
    assert module.notes == ()


CHAIN = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%first (p.0: bf16[4,64]) -> (bf16[4,64], bf16[64,64], u32[]) {
  %p.0 = bf16[4,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %ag.0 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=72, replica_groups=mesh['axis_0'=16,'axis_1'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/dot_general"}
  ROOT %start = (bf16[4,64]{1,0}, bf16[64,64]{1,0}, u32[]{:S(2)}) custom-call(%ag.0), custom_call_target="AsyncCollectiveStart"
}

%middle (p.1: bf16[4,64], q.1: bf16[8,8], r.1: bf16[2,16]) -> bf16[8,8] {
  %p.1 = bf16[4,64]{1,0} parameter(0)
  %ag.1 = bf16[64,64]{1,0} all-gather(%p.1), channel_id=72, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="0"}
  %r.1 = bf16[2,16]{1,0} parameter(2)
  %other = bf16[32,16]{1,0} all-gather(%r.1), channel_id=73, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="1"}
  %start.1 = (bf16[2,16]{1,0}, bf16[32,16]{1,0}, u32[]{:S(2)}) custom-call(%other), custom_call_target="AsyncCollectiveStart"
  %q.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %product = bf16[8,8]{1,0} convolution(%q.1, %q.1), dim_labels=bf_io->bf
}

%last (p.2: bf16[4,64], r.2: bf16[2,16]) -> bf16[64,64] {
  %p.2 = bf16[4,64]{1,0} parameter(0)
  %r.2 = bf16[2,16]{1,0} parameter(1)
  %ag.2 = bf16[64,64]{1,0} all-gather(%p.2), channel_id=72, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="0"}
  %other.2 = bf16[32,16]{1,0} all-gather(%r.2), channel_id=73, replica_groups=[1,16]<=[16], dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %done = bf16[64,64]{1,0} custom-call(%p.2, %ag.2, %other.2), custom_call_target="AsyncCollectiveDone"
}

%lone (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} all-reduce(%p.3), channel_id=9, replica_groups={}, to_apply=%region, frontend_attributes={chain_id="7"}
}

%again (p.4: f32[8]) -> f32[8] {
  %p.4 = f32[8]{0} parameter(0)
  ROOT %sum.4 = f32[8]{0} all-reduce(%p.4), channel_id=9, replica_groups={}, to_apply=%region, frontend_attributes={chain_id="7"}
}

%region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%cond (s: (s32[], bf16[4,64])) -> pred[] {
  %s = (s32[], bf16[4,64]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%body (s.1: (s32[], bf16[4,64])) -> (s32[], bf16[4,64]) {
  %s.1 = (s32[], bf16[4,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s.1), index=0
  %v = bf16[4,64]{1,0} get-tuple-element(%s.1), index=1
  %t = bf16[2,16]{1,0} constant({...})
  %w = bf16[8,8]{1,0} constant({...})
  %f.0 = (bf16[4,64]{1,0}, bf16[64,64]{1,0}, u32[]) fusion(%v), kind=kCustom, calls=%first
  %f.1 = bf16[8,8]{1,0} fusion(%v, %w, %t), kind=kOutput, calls=%middle, backend_config={"estimated_cycles":"100"}
  %f.2 = bf16[64,64]{1,0} fusion(%v, %t), kind=kCustom, calls=%last
  ROOT %out = (s32[], bf16[4,64]{1,0}) tuple(%i, %v)
}

ENTRY %main (a: f32[8], b: (s32[], bf16[4,64])) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = (s32[], bf16[4,64]{1,0}) parameter(1)
  %l = f32[8]{0} fusion(%a), kind=kCustom, calls=%lone
  %loop = (s32[], bf16[4,64]{1,0}) while(%b), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %m = f32[8]{0} fusion(%l), kind=kCustom, calls=%again
}
"""  # noqa: E501


def test_a_chain_of_fusions_is_one_collective() -> None:
    """As XLA:TPU writes an asynchronous collective: whole in every fusion of its chain."""
    module = read_module(CHAIN)
    kinds = module.by_kind()
    gathers = sorted((c.count, c.payload_bytes) for c in module.collectives if "gather" in c.kind)
    assert gathers == [(3, 32 * 16 * 2), (3, 64 * 64 * 2)]
    assert kinds["all_gather"].wire_bytes == 3 * (32 * 16 + 64 * 64) * 2 * 15 / 16
    assert kinds["all_reduce"].count == 1  # nothing in the text starts this chain
    assert module.cycles == 300
    # between the fusions that start and end both gathers stands one of 100 cycles
    assert [c.beside_cycles for c in module.collectives if "gather" in c.kind] == [100, 100]
    assert [c.beside_cycles for c in module.collectives if "reduce" in c.kind] == [0]
    unlike = CHAIN.replace("channel_id=73, replica_groups=[1,16]<=[16], dimensions={0}, ", "")
    assert read_module(unlike).by_kind()["all_gather"].count == 6
    alone = re.sub(r', frontend_attributes=\{chain_id="\d"\}', "", CHAIN)
    assert read_module(alone).by_kind()["all_gather"].count == 15


def test_bytes_of_what_has_no_estimate() -> None:
    """A lookup of 16 rows: they and their numbers are read and written, the table is not."""
    text = """\
HloModule jit_step, is_scheduled=true, num_partitions=1

ENTRY %main (a: f32[1000,8], b: s32[16,1]) -> f32[16,8] {
  %a = f32[1000,8]{1,0} parameter(0)
  %b = s32[16,1]{1,0} parameter(1)
  %g = f32[16,8]{1,0} gather(%a, %b), offset_dims={1}, backend_config={}
  ROOT %m = f32[16,8]{1,0} multiply(%g, %g), backend_config={"estimated_cycles":"7"}
}
"""
    module = read_module(text)
    assert module.cycles == 7
    assert module.unpriced_bytes == 2 * (16 * 4 + 16 * 8 * 4)
    assert read_module(text.replace('"estimated_cycles":"7"', "")).unpriced_bytes == 0


SPARSECORE = """\
HloModule jit_f, is_scheduled=true, num_partitions=16

%called (x: bf16[64]) -> bf16[1024] {
  %x = bf16[64]{0} parameter(0)
  ROOT %all-gather.2 = bf16[1024]{0} all-gather(%x), replica_groups=[1,16]<=[16], dimensions={0}
}

ENTRY %main (p: bf16[64], q: f32[8]) -> (bf16[1024], f32[8]) {
  %p = bf16[64]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %ag-start = ((bf16[64]{0}), bf16[1024]{0}) call-start(%p), to_apply=%called
  %work = f32[8]{0} add(%q, %q), backend_config={"window_config":{"estimated_cycles":"700"}}
  %ag-done = bf16[1024]{0} call-done(%ag-start)
  ROOT %out = (bf16[1024]{0}, f32[8]{0}) tuple(%ag-done, %work)
}
"""


def test_collectives_on_sparsecores_are_found() -> None:
    (found,) = read_module(SPARSECORE).collectives
    assert (found.kind, found.group_size, found.payload_bytes) == ("all_gather", 16, 2048.0)
    assert found.beside_cycles == 700.0


def test_text_of_the_users_in_an_instruction_spans_lines() -> None:
    """Kernels with metadata, as Pallas writes them for a TPU."""
    written = LOOP.replace(
        "  %cp.1 = f32[8,128]",
        """\
  %kernel = f32[8,128] custom-call(%a), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 128}"
}}, metadata={op_name="kernel"}, backend_config={"window_config":{"estimated_cycles":"7"}}
  %cp.1 = f32[8,128]""",
    )
    plain, more = read_module(LOOP), read_module(written)
    assert more.cycles == plain.cycles + 7 and more.by_kind() == plain.by_kind()
    kernel = parse(written).computations["main"].instructions["kernel"]
    assert kernel.target == "tpu_custom_call" and kernel.op_name == "kernel"
