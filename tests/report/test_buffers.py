"""XLA's buffers: what its text says, and what lies in a buffer when most of it is in use, against counting bytes."""

from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from jscaler.errors import JscalerError
from jscaler.report.buffers import Allocation, BufferValue, dump_options, fullest, parse_allocations, read_dump, twins

ASSIGNMENT = """BufferAssignment:
allocation 0: size 16384, parameter 33, shape |f32[64,64]| at ShapeIndex {}, maybe-live-out:
 value: <6538 param.154 @0> (size=16384,offset=0): f32[64,64]{1,0}
 value: <7053 loop_add_fusion.11{0} @0> (size=16384,offset=0): f32[64,64]{1,0}
allocation 1: size 520, output shape is |(s32[], f32[6,2,32])|, maybe-live-out:
 value: <9 tuple.1{} @0> (size=520,offset=0): (s32[], f32[6,2,32]{2,1,0})
allocation 2: size 4, constant:
 value: <5049 constant_1230_clone_1_0 @0> (size=4,offset=0): s32[]
allocation 3: size 4, thread-local:
 value: <1 psum.0 @0> (size=4,offset=0): f32[]
allocation 4: size 1536, preallocated-temp:
 value: <5392 while.57{2} (phi) @0> (size=1024,offset=512): bf16[4,128]{1,0}
 value: <12 dot.1 @0> (size=512,offset=0): s8[512]{0}
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:param.154
  BufferLiveRange:
    param.154{}:0-9
    while.57{2}:3-7
    dot.1{}:5-5
"""


def test_the_text_of_a_buffer_assignment() -> None:
    found = parse_allocations(ASSIGNMENT, RANGES)
    assert [(a.kind, a.size, a.parameter) for a in found] == [
        ("argument", 16384, 33), ("output", 520, None), ("constant", 4, None), ("temporary", 1536, None)
    ]  # fmt: skip
    assert found[-1].values == (
        BufferValue("while.57", (2,), 512, 1024, "bf16[4,128]", 3, 7),
        BufferValue("dot.1", (), 0, 512, "s8[512]", 5, 5),
    )
    assert [(h.value.instruction, h.nbytes) for h in fullest(found[-1])] == [("while.57", 1024), ("dot.1", 512)]
    assert twins(found[0], found[0].values[0]) == [found[0].values[1]]


VALUES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9)).map(
        lambda v: (v[0], v[1], min(v[2:]), max(v[2:]))
    ),
    max_size=12,
)


@given(VALUES)
def test_the_fullest_moment_is_that_of_the_most_bytes(drawn: list[tuple[int, int, int, int]]) -> None:
    values = tuple(BufferValue(f"v{i}", (), offset, size, "", a, b) for i, (offset, size, a, b) in enumerate(drawn))
    held = fullest(Allocation("temporary", 20, None, values))
    counted = [
        {byte for v in values if v.start <= moment <= v.stop for byte in range(v.offset, v.offset + v.size)}
        for moment in range(10)
    ]
    assert sum(h.nbytes for h in held) == max(map(len, counted))
    common = set.intersection(*({*range(h.value.start, h.value.stop + 1)} for h in held)) if held else {0}
    assert common, "they are not held at one moment"
    assert all(0 < h.nbytes <= h.value.size for h in held)


def test_what_xla_writes_adds_up_to_its_own_figures(tmp_path: Path) -> None:
    def fun(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        last, rows = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w),) * 2, leaves[0], leaves[1])
        return last, rows.sum(0)

    structs = [jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((4, 32, 32), "float32")]
    compiled = jax.jit(fun).lower(structs).compile(dump_options(tmp_path))
    dump, stats = read_dump(tmp_path), compiled.memory_analysis()
    assert stats is not None
    assert dump.size("argument") == stats.argument_size_in_bytes
    assert dump.size("output") == stats.output_size_in_bytes
    assert dump.size("temporary") == stats.temp_size_in_bytes
    (temporary,) = [a for a in dump.allocations if a.kind == "temporary"]
    assert 4 * 32 * 32 * 4 <= sum(h.nbytes for h in fullest(temporary)) <= temporary.size


def test_nothing_was_compiled(tmp_path: Path) -> None:
    with pytest.raises(JscalerError, match=r"no buffer assignment into .*persistent compilation cache"):
        read_dump(tmp_path)
