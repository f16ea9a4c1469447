"""Tables and the blocks of a loop over groups: by default 1F1B on a chain; each block once, behind what it waits for."""

from collections.abc import Sequence

import pytest

from jscaler.errors import OrderError, PlanError, PlanWarning, ScheduleWarning
from jscaler.ir import Loop
from jscaler.lower.flat_program import FlatProgram, Origins
from jscaler.lower.level import AGAIN, WEIGHTS, Level
from jscaler.lower.loop_blocks import Cell, LoopBlocks, sums_of
from jscaler.lower.oldest_first import one_forward_one_backward
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.spanning_loop import CarriedValue, SpanningLoop
from jscaler.lower.table_binding import bound_table, in_table_order
from jscaler.materialize import DeviceMesh
from jscaler.tables import SCHEDULES, Table

NOTHING = FlatProgram((), (), (), (), Origins({}, {}, {}))
Spec = tuple[int, Level, str, Sequence[int]]  # group, level, names, and the blocks that it reads


def loop_of(specs: Sequence[Spec], microbatches: int) -> LoopBlocks:
    """The blocks of an iteration, each waiting for those that it reads."""
    blocks = []
    for group, level, names, _ in specs:
        own = tuple((int(name[:-1]), name[-1]) for name in names.split())
        mesh = DeviceMesh((group,), (("d", 1),))
        blocks.append(PlacedBlock(mesh, 1, level, NOTHING, (), (), (), (), (), (), names=own))  # type: ignore[arg-type]
    rows: dict[DeviceMesh, list[int]] = {}
    for number in sorted(range(len(blocks)), key=lambda n: blocks[n].level):
        rows.setdefault(blocks[number].group, []).append(number)
    spanning = SpanningLoop(Loop("micro-batches", microbatches, time="m"), range(1, 2), (), (), {})
    waits = {(n, i): {(m, i) for m in spec[3]} for n, spec in enumerate(specs) for i in range(microbatches)}
    sent_at = {Level(spec[1].number) for spec in specs[:-1] if spec[1].part == 0}
    ordered = dict(sorted(rows.items(), key=lambda row: row[0].devices))
    return LoopBlocks(blocks, spanning, ordered, waits, sent_at)


def chain(stages: int, microbatches: int, halves: bool = False) -> LoopBlocks:
    """A chain of stages, one on each group; the last goes forward and back in one block."""
    last = stages - 1
    specs: list[Spec] = [(n, Level(n), f"{n}F", [n - 1] if n else []) for n in range(last)]
    specs.append((last, Level(last), f"{last}F {last}B", [last - 1] if last else []))
    for n in reversed(range(last)):
        before = next(
            k for k, spec in enumerate(specs) if any(name in spec[2].split() for name in (f"{n + 1}B", f"{n + 1}I"))
        )
        specs.append((n, Level(2 * last - n), f"{n}{'I' if halves else 'B'}", [n, before]))
        if halves:
            specs.append((n, Level(2 * last - n, WEIGHTS), f"{n}W", [len(specs) - 1]))
    return loop_of(specs, microbatches)


def check_order(loop: LoopBlocks, rounds: Sequence[Sequence[tuple[Cell, ...]]]) -> None:
    """Every block runs once at each iteration, in a round behind those of what it waits for."""
    runs = [(at, number) for number, entries in enumerate(rounds) for entry in entries for at in entry]
    assert sorted(at for at, _ in runs) == sorted(loop.waits)
    when = dict(runs)
    for at, needed in loop.waits.items():
        together = next(entry for entry in rounds[when[at]] if at in entry)
        assert all(when[other] < when[at] or other in together[: together.index(at)] for other in needed)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_a_chain_runs_one_forward_one_backward_by_default(stages: int, microbatches: int) -> None:
    loop = chain(stages, microbatches)
    table = bound_table(loop, None)
    assert table == SCHEDULES["1f1b"].table(stages, microbatches)
    check_order(loop, in_table_order(loop, table))


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_as_many_under_way_as_there_are_is_gpipe(microbatches: int) -> None:
    loop = loop_of(
        [(0, Level(0), "0F", []), (1, Level(1), "1F", [0]), (1, Level(2), "1B", [1]), (0, Level(3), "0B", [0, 2])],
        microbatches,
    )
    rows = one_forward_one_backward(loop, microbatches)
    assert rows[0] == [(0, i) for i in range(microbatches)] + [(3, i) for i in range(microbatches)]


@pytest.mark.parametrize(("name", "pairs"), [("zb_h1", 0), ("1f1b", 8)])
def test_halves_of_a_backward_run_where_the_table_has_them(name: str, pairs: int) -> None:
    """Where it has whole backwards, I and W are one executable."""
    loop = chain(3, 4, halves=True)
    table = bound_table(loop, SCHEDULES[name])
    rounds = in_table_order(loop, table)
    check_order(loop, rounds)
    assert sum(len(entry) == 2 for entries in rounds for entry in entries) == pairs


def test_a_published_cell_without_a_block_is_said() -> None:
    """The first stage is frozen: it has no backward."""
    loop = loop_of([(0, Level(0), "0F", []), (1, Level(1), "1F 1B", [0])], 3)
    with pytest.warns(PlanWarning, match="'1f1b' has 0B, for which this step has no block"):
        table = bound_table(loop, SCHEDULES["1f1b"])
    assert str(table) == "0F0 0F1 0F2\n1F0 1B0 1F1 1B1 1F2 1B2"


def test_a_schedule_that_does_not_go_with_the_blocks_is_said() -> None:
    loop = chain(3, 4)
    with pytest.warns(ScheduleWarning, match="'interleaved' does not go with this step, which runs one forward"):
        table = bound_table(loop, SCHEDULES["interleaved"])
    assert table == SCHEDULES["1f1b"].table(3, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", r"row 0 of the table, that of devices \[0\], lacks '0B1'; it runs '0F for micro-"),
        ("0F0 0F1 0B0 0B1 0B1\n1F0 1B0 1F1 1B1", "has twice '0B1'"),
        ("0F0 0F1 0B0 0B1 1F0\n1B0 1F1 1B1", r"has '1F0 of devices \[1\]"),
        ("0F0 0F1 0B0 0B1", "the table has 1 rows, and the loop's ops lie on 2 device groups"),
    ],
)
def test_a_table_has_each_block_once_in_the_row_of_its_group(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bound_table(chain(2, 2), Table.parse(text))


def test_a_table_that_waits_for_itself_is_refused() -> None:
    loop = chain(2, 2)
    table = bound_table(loop, Table.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))
    with pytest.raises(OrderError, match=r"0B0 \(\), next on devices \[0\], waits for 1F0\+1B0; 1F1\+1B1 .* waits for 0F1"):
        in_table_order(loop, table)


def test_what_is_computed_again_runs_as_late_as_its_reader_may() -> None:
    """Its reader waits for stage 1; so does it, or what it leaves would be held for longer."""
    specs: list[Spec] = [
        (0, Level(0), "0F", []),
        (1, Level(1), "1F 1B", [0]),
        (0, Level(0, AGAIN), "0R", [0]),
        (0, Level(2), "0B", [2, 1]),
    ]
    assert str(bound_table(loop_of(specs, 2), None)).splitlines()[0] == "0F0 0F1 0R0 0B0 0R1 0B1"


def test_layers_of_a_stack_are_executables_of_their_own() -> None:
    """A stage's ends and its layers are one cell, and run one after the other."""
    loop = loop_of(
        [(0, Level(0), "0F", []), (0, Level(1), "0F", [0]), (0, Level(2), "0B", [1]), (0, Level(3), "0B", [2])], 1
    )
    loop.blocks[1].__dict__["of_layers"] = loop.blocks[2].__dict__["of_layers"] = True
    rounds = in_table_order(loop, Table.parse("0F0 0B0"))
    assert [entry for entries in rounds for entry in entries] == [((0, 0),), ((1, 0),), ((2, 0),), ((3, 0),)]


def block_with(imports: Sequence[int], exports: Sequence[int], name: str = "F") -> PlacedBlock:
    mesh, ends = DeviceMesh((0,), (("d", 1),)), (None,) * 2
    names = ((0, name),)
    return PlacedBlock(mesh, 1, Level(), NOTHING, (), tuple(imports), (), tuple(exports), ends, ends, names=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_sum", [True, False])
def test_what_all_blocks_add_to_may_be_added_in_any_order(is_sum: bool) -> None:
    """Not what one of them takes and another leaves: that goes from iteration to iteration, as a state does."""
    spanning = SpanningLoop(Loop("m", 3, time="m"), range(1, 2), (CarriedValue(0, 1, 2, 3, is_sum),), (), {})
    assert sums_of([block_with([1], [2]), block_with([1], [2])], spanning) == ({1} if is_sum else set())
    assert sums_of([block_with([1], [2]), block_with([1], [4])], spanning) == set()


def test_a_block_waits_for_the_state_that_the_micro_batch_before_leaves() -> None:
    spanning = SpanningLoop(Loop("m", 3, time="m"), range(1, 2), (CarriedValue(0, 1, 2, 3, False),), (), {})
    waits = LoopBlocks.of([block_with([1], [2])], [], spanning).waits
    assert waits == {(0, 0): set(), (0, 1): {(0, 0)}, (0, 2): {(0, 1)}}
