"""Stages of blocks are the plan's; where it gives none to a block, or one to several, they are numbered by levels."""

from typing import Any

import pytest

from jscaler.lower.block_names import BlockNames, BlockOps
from jscaler.lower.level import AGAIN, BlockKey, Level

GROUPS = 3


def key(place: int, number: int, part: int = 0, phase: int = 1) -> BlockKey:
    return BlockKey(phase, place, Level(number, part))


def ops(text: str, **changes: Any) -> BlockOps:
    works: set[Any] = {(int(work[:-1]) if work[:-1] else None, work[-1]) for work in text.split()}
    return BlockOps(works, **changes)


def names_of(blocks: dict[BlockKey, BlockOps]) -> dict[BlockKey, str]:
    named = BlockNames(blocks, lambda place: place % GROUPS, lambda place: place >= GROUPS).names()
    return {where: " ".join(f"{stage}{kind}" for stage, kind in names) for where, names in named.items()}


def test_a_block_is_of_the_stages_of_its_ops() -> None:
    blocks = {key(0, 0): ops("0F"), key(1, 1): ops("1F 1B"), key(0, 2): ops("0B")}
    assert names_of(blocks) == {key(0, 0): "0F", key(1, 1): "1F 1B", key(0, 2): "0B"}


def test_layers_and_ends_of_a_stage_are_two_blocks_of_one_name() -> None:
    blocks = {key(0, 0): ops("0F"), key(GROUPS, 1): ops("0F"), key(0, 3): ops("0B"), key(GROUPS, 2): ops("0B")}
    assert names_of(blocks) == {key(0, 0): "0F", key(GROUPS, 1): "0F", key(0, 3): "0B", key(GROUPS, 2): "0B"}


def test_what_could_run_early_counts_where_it_is_read() -> None:
    """A second pass's look-up in front of its stage's block."""
    blocks = {key(0, 0): ops("0F 2F"), key(1, 1): ops("1F"), key(0, 2): ops("2F 2B")}
    assert names_of(blocks) == {key(0, 0): "0F", key(1, 1): "1F", key(0, 2): "2B"}


def chain(stages: int, work: str = "{kind}") -> dict[BlockKey, BlockOps]:
    """A chain of stages, the last of which goes forward and back in one block."""
    blocks = {key(stage, stage): ops(work.format(kind="F"), takes_activation=stage > 0) for stage in range(stages - 1)}
    last = stages - 1
    blocks[key(last, last)] = ops("F B", takes_activation=True)
    return blocks | {key(stage, 2 * last - stage): ops("B") for stage in range(last)}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_without_a_plan_are_numbered_by_levels(stages: int) -> None:
    last = stages - 1
    wanted = {key(n, n): f"{n}F" for n in range(last)} | {key(last, last): f"{last}F {last}B"}
    assert names_of(chain(stages)) == wanted | {key(n, 2 * last - n): f"{n}B" for n in range(last)}


def test_first_stages_that_are_frozen_have_no_backward() -> None:
    blocks = {key(0, 0): ops("F"), key(1, 1): ops("F"), key(2, 2): ops("F B", takes_activation=True), key(1, 3): ops("B")}
    assert names_of(blocks) == {key(0, 0): "0F", key(1, 1): "1F", key(2, 2): "2F 2B", key(1, 3): "1B"}


def test_a_stage_in_several_blocks_has_them_numbered_by_levels() -> None:
    """As 3F1B: the second visit of a stage is a stage of its own."""
    blocks = {
        key(0, 0): ops("0F"),
        key(1, 1): ops("1F"),
        key(0, 2): ops("0F"),
        key(1, 3): ops("1F 1B", takes_activation=True),
        key(0, 4): ops("0B"),
    }
    named = names_of(blocks)
    assert [named[where] for where in sorted(blocks, key=lambda where: where.level)] == ["0F", "1F", "2F", "3F 3B", "2B"]


def test_what_is_computed_again_is_of_the_stage_that_reads_it_first() -> None:
    again = key(0, 0, AGAIN)
    blocks = {
        key(0, 0): ops("0F"),
        again: ops("R"),
        key(1, 1): ops("1F 1B"),
        key(0, 2): ops("0B", reads={again}),
    }
    assert names_of(blocks)[again] == "0R"


def test_turns_are_numbered_each_for_itself() -> None:
    blocks = {key(0, 0, phase=phase): ops("F") for phase in (1, 2)} | {key(1, 1, phase=phase): ops("F") for phase in (1, 2)}
    assert set(names_of(blocks).values()) == {"0F", "1F"}


def test_what_is_computed_again_for_another_that_is_alone_is_of_that_ones_stage() -> None:
    first, second = key(0, 0, AGAIN), key(0, 1, AGAIN)
    blocks = {
        key(0, 0): ops("0F"),
        first: ops("R"),
        second: ops("R", reads={first}),
        key(1, 1): ops("1F 1B"),
        key(0, 2): ops("0B", reads={second}),
    }
    named = names_of(blocks)
    assert named[first] == named[second] == "0R"
