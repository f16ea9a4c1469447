"""Scopes of HLO instructions: their own, those inside a fusion, those of what they are made of."""

import pytest

from jscaler.report.hlo_scopes import Scopes

TEXT = """HloModule jit_run, is_scheduled=true

%fused (p0: f32[8], p1: f32[8]) -> (f32[8], f32[4,8]) {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %mul = f32[8]{0} multiply(%p0, %p1), metadata={op_name="jit(run)/shard_map/mlp/dot~backward/mul"}
  %zeros = f32[4,8]{1,0} broadcast(%p1), dimensions={1}
  %row = f32[1,8]{1,0} bitcast(%mul)
  %stacked = f32[4,8]{1,0} dynamic-update-slice(%zeros, %row), metadata={op_name="jit(run)/shard_map/while/body/dus"}
  ROOT %both = (f32[8]{0}, f32[4,8]{1,0}) tuple(%p0, %stacked)
}

%body (state: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
  %state = (f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=0
  %step = (f32[8]{0}, /*index=1*/f32[4,8]{1,0}) fusion(%x, %x), kind=kLoop, calls=%fused
  %new = f32[8]{0} get-tuple-element(%step), index=0
  %stack = f32[4,8]{1,0} get-tuple-element(%step), index=1
  ROOT %out = (f32[8]{0}, f32[4,8]{1,0}) tuple(%new, %stack)
}

ENTRY %main (a: f32[8], b: f32[4,8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="leaves[3]"}
  %b = f32[4,8]{1,0} parameter(1), metadata={op_name="leaves[0]"}
  %init = (f32[8]{0}, f32[4,8]{1,0}) tuple(%a, %b)
  %loop = (f32[8]{0}, f32[4,8]{1,0}) while(%init), condition=%never, body=%body
  %first = f32[8]{0} get-tuple-element(%loop), index=0
  %sum = f32[8]{0} all-reduce-start(%first), to_apply=%add, metadata={op_name="jit(run)/(mlp/dot:0~adapter/psum:b/psum)"}
  %pair = (f32[8]{0}, f32[8]{0}) all-reduce(%a, %twice), to_apply=%add, metadata={op_name="jit(run)/(add/a:add/b)"}
  %done = f32[8]{0} all-reduce-done(%sum)
  %twice = f32[8]{0} copy(%done)
  ROOT %last = f32[8]{0} add(%a, %a), metadata={op_name="jit(run)/shard_map/update/add.1/add"}
}
"""
KNOWN = ["mlp/dot~backward", "mlp/dot:0~adapter", "update/add.1", "add", "update"]


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        ("last", (), "update/add.1"),  # the longest of those that begin there
        ("sum", (), "mlp/dot:0~adapter"),  # the first of what was merged
        ("twice", (), "mlp/dot:0~adapter"),  # by its operand
        ("pair", (1,), "mlp/dot:0~adapter"),  # that of the tensor, not of all that are reduced together
        ("step", (1,), "mlp/dot~backward"),  # what is written into the stack
        ("loop", (1,), "mlp/dot~backward"),  # by the body
        ("loop", (0,), ""),  # an argument, handed through
        ("a", (), ""),
        ("nowhere", (), ""),
    ],
)
def test_scopes(name: str, index: tuple[int, ...], expected: str) -> None:
    assert Scopes(TEXT, KNOWN).of(name, index) == expected


def test_arguments_of_the_program_by_number() -> None:
    assert Scopes(TEXT, KNOWN).parameters == {0: "leaves[3]", 1: "leaves[0]"}
