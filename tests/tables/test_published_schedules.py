"""The schedules of the literature: their published numbers, for which numbers they exist, and that they are legal there."""

import dataclasses
import doctest
import importlib
import itertools
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType

import hypothesis.strategies as st
import pytest
from hypothesis import given
from of_the_day import drawn
from tables.chains import check_chain

import jscaler.tables
from jscaler import PlanError
from jscaler.tables import SCHEDULES, BlockKind, Published, Table, TableCell
from jscaler.tables.files import csv_text, parse_csv
from jscaler.tables.simulator import UNITS, idle, most_activations, simulate_table
from jscaler.tables.table import most_live
from jscaler.tables.timeline import Timeline

Numbers = tuple[int, int, int]
EVEN: Mapping[BlockKind, float] = {"F": 1.0, "B": 1.0}  # a backward as long as a forward
UNEVEN: Mapping[BlockKind, float] = {"F": 1.0, "I": 1.2, "W": 0.8, "B": 2.0}
SMALL = list(itertools.product(range(1, 6), range(1, 13), range(1, 4)))  # groups, micro-batches, chunks


def simulated(name: str, numbers: Numbers, seconds: Mapping[BlockKind, float] = UNITS, of_chunk: bool = False) -> Timeline:
    """With seconds of all that a device has of the model; or of one chunk of it."""
    schedule, (groups, microbatches, chunks) = SCHEDULES[name], numbers
    share = 1 if of_chunk or schedule.passes else chunks
    devices = [[*range(groups)], *([group] for group in range(groups))] if schedule.everywhere else None
    times = {kind: own / share for kind, own in seconds.items()}
    return simulate_table(schedule.table(groups, microbatches, chunks), times, devices=devices)


def peaks(name: str, numbers: Numbers) -> list[float]:
    """Of each group, in micro-batches of all its chunks."""
    return [most_activations(row) / numbers[2] for row in SCHEDULES[name].table(*numbers).rows]


def span(timeline: Timeline, device: int) -> float:
    """From the begin of a device's first run to the end of its last."""
    own = [one for one in timeline.runs if device in one.devices]
    return max(one.end for one in own) - min(one.begin for one in own)


GOLDEN = [  # schedule, numbers, makespan, peak of the first group: F = I = W = 1, B = 2
    ("gpipe", (4, 4, 1), 21, 4),
    ("gpipe", (4, 8, 1), 33, 8),
    ("gpipe", (8, 32, 1), 117, 32),
    ("1f1b", (4, 4, 1), 21, 4),
    ("1f1b", (4, 8, 1), 33, 4),
    ("1f1b", (8, 32, 1), 117, 8),
    ("eager_1f1b", (4, 4, 1), 21, 4),
    ("eager_1f1b", (4, 8, 1), 33, 7),
    ("eager_1f1b", (8, 32, 1), 117, 15),
    ("interleaved", (4, 8, 2), 28.5, 5.5),
    ("interleaved", (8, 32, 2), 106.5, 11.5),
    ("interleaved", (4, 8, 4), 26.25, 4.75),
    ("interleaved", (8, 32, 4), 101.25, 9.75),
    ("breadth_first", (4, 8, 2), 28.5, 8),
    ("breadth_first", (8, 32, 2), 106.5, 32),
    ("breadth_first", (4, 8, 4), 26.25, 8),
    ("breadth_first", (8, 32, 4), 101.25, 32),
    ("zb_h1", (4, 8, 1), 27, 4),
    ("zb_h1", (8, 32, 1), 103, 8),
    ("zb_h2", (4, 8, 1), 27, 7),
    ("zb_h2", (8, 32, 1), 103, 15),
    ("zb_v", (4, 8, 2), 25.5, 4),
    ("zb_v", (4, 16, 2), 49.5, 4),
    ("zb_v", (8, 32, 2), 99.5, 8),
    ("forward_only", (4, 8, 1), 11, 0),
]


@pytest.mark.parametrize(("name", "numbers", "makespan", "peak"), GOLDEN)
def test_golden_makespans_and_peaks(name: str, numbers: Numbers, makespan: float, peak: float) -> None:
    assert simulated(name, numbers).makespan == makespan
    assert peaks(name, numbers)[0] == peak


@pytest.mark.parametrize(("groups", "even", "uneven"), [(4, 10, 16), (6, 16, 26)])
def test_chimera_in_one_unit(groups: int, even: int, uneven: int) -> None:
    """With backwards as long as forwards, and twice as long; the bubble's share is that of the paper."""
    timeline, longer = simulated("chimera", (groups, groups, 1), EVEN), simulated("chimera", (groups, groups, 1))
    assert (timeline.makespan, longer.makespan) == (even, uneven)
    assert timeline.bubble == pytest.approx((groups - 2) / (3 * groups - 2))
    assert longer.bubble == pytest.approx((groups - 2) / (2.5 * groups - 2))
    held = peaks("chimera", (groups, groups, 1))
    assert (min(held), max(held)) == (groups / 2 + 1, groups)


@pytest.mark.parametrize(("groups", "units"), [(2, 3), (4, 2), (4, 5), (6, 3)])
def test_chimera_s_units_follow_without_a_gap(groups: int, units: int) -> None:
    timeline = simulated("chimera", (groups, units * groups, 1), EVEN)
    assert timeline.makespan == 2 * units * groups + groups - 2
    assert max(peaks("chimera", (groups, units * groups, 1))) == groups


def test_chimera_s_picture() -> None:
    """What the module draws of the first of four devices: as long as a unit, and nothing runs before it can."""
    picture = re.search(r"d0 +(.*)", importlib.import_module("jscaler.tables.chimera").__doc__ or "")
    assert picture is not None
    slots = picture[1].split()
    timeline = simulated("chimera", (4, 4, 1), EVEN)
    own = [one for one in timeline.runs if one.devices == (0,)]
    assert [f"{one.cells[0].kind}{one.cells[0].microbatch}" for one in own] == [slot for slot in slots if slot != "."]
    assert all(one.begin <= time for one, time in zip(own, (t for t, s in enumerate(slots) if s != "."), strict=True))
    assert len(slots) == timeline.makespan


@pytest.mark.parametrize(("groups", "microbatches", "waits", "held"), [(4, 16, 6, 9), (8, 32, 14, 17)])
def test_dualpipe_v_waits_as_published(groups: int, microbatches: int, waits: int, held: int) -> None:
    """(p / 2 - 1)(F&B + B - 3W) for p stages on half as many devices, in seconds of a chunk; p + 1 chunks are held."""
    timeline = simulated("dualpipe_v", (groups, microbatches, 2), of_chunk=True)
    assert idle(timeline, 0) == waits == (groups - 1) * (3 + 2 - 3)
    assert span(timeline, 0) == 6 * microbatches + waits
    assert {2 * own for own in peaks("dualpipe_v", (groups, microbatches, 2))} == {held}


@pytest.mark.parametrize("seconds", [UNITS, UNEVEN])
@pytest.mark.parametrize("numbers", [(4, 8, 1), (8, 32, 1)])
def test_zero_bubble_formulas(numbers: Numbers, seconds: Mapping[BlockKind, float]) -> None:
    """H1 waits (p - 1)(F + I - W), H2 (p - 1)(F + I - 2W), however long the blocks are, and its W fill no more."""
    groups, microbatches, _ = numbers
    work = microbatches * (seconds["F"] + seconds["I"] + seconds["W"])
    first = simulated("zb_h1", numbers, seconds)
    waits = (groups - 1) * (seconds["F"] + seconds["I"] - seconds["W"])
    assert idle(first, 0) == pytest.approx(waits)
    assert first.makespan == pytest.approx(work + waits)
    second = simulated("zb_h2", numbers, seconds)
    least = (groups - 1) * (seconds["F"] + seconds["I"] - 2 * seconds["W"])
    assert idle(second, 0) == pytest.approx(least)
    assert max(span(second, device) for device in range(groups)) == pytest.approx(work + least)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("zb_h2", (4, 8, 1)), ("zb_h2", (8, 32, 1)), ("zb_v", (4, 8, 2)), ("zb_v", (4, 16, 2)), ("zb_v", (8, 32, 2))],
)
def test_no_group_waits_in_its_own_span(name: str, numbers: Numbers) -> None:
    """24 of 27 units at (4, 8), 96 of 103 at (8, 32) for ZB-H2; ZB-V alike, and it holds as much on every device."""
    timeline = simulated(name, numbers)
    spans = [span(timeline, device) for device in range(numbers[0])]
    assert set(spans) == {3 * numbers[1]}
    assert timeline.makespan > max(spans)
    assert len(set(peaks(name, numbers))) == 1


@pytest.mark.parametrize(("groups", "microbatches"), [(p, m) for p, m, chunks in SMALL if chunks == 1])
def test_formulas_for_all_small_numbers(groups: int, microbatches: int) -> None:
    """What a device waits behind the ideal 3m, and what stage s holds, where a schedule exists."""
    p, m = groups, microbatches
    for name, most in {
        "gpipe": [m] * p,
        "1f1b": [min(p - s, m) for s in range(p)],
        "eager_1f1b": [min(2 * (p - s) - 1, m) for s in range(p)],
    }.items():
        assert simulated(name, (p, m, 1)).makespan == 3 * (m + p - 1)
        assert peaks(name, (p, m, 1)) == most
    assert simulated("forward_only", (p, m, 1)).makespan == m + p - 1
    for v in (2, 3):
        waits = 3 * (p - 1) / v
        if m >= p:
            assert simulated("breadth_first", (p, m, v)).makespan == pytest.approx(3 * m + waits)
        if m % p == 0:
            assert simulated("interleaved", (p, m, v)).makespan == pytest.approx(3 * m + waits)
        if m % p == 0 and m > p:
            assert peaks("interleaved", (p, m, v))[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
    if m >= 2 * p - 1:
        assert simulated("zb_h1", (p, m, 1)).makespan == 3 * m + p - 1
        assert set(peaks("zb_h1", (p, m, 1))) == {p}
    if m >= 2 * p:
        assert {span(simulated("zb_h2", (p, m, 1)), device) for device in range(p)} == {3 * m}
        assert set(peaks("zb_h2", (p, m, 1))) == {2 * p - 1}
    if m >= 2 * p - 1:
        assert simulated("zb_v", (p, m, 2)).makespan == 3 * m + (p - 1) / 2
        assert set(peaks("zb_v", (p, m, 2))) == {p}
    assert [3 * held for held in peaks("3f1b", (p, m, 3))] == [min(p - s, m) for s in range(p)], "of the last pass alone"


def rows_of(schedule: Published, groups: int, microbatches: int, chunks: int) -> list[set[TableCell]]:
    """The blocks that each row should have, from what a schedule says of where stages lie."""
    ends = schedule.everywhere
    count = groups * chunks
    found = [set[TableCell]() for _ in range(groups + ends)]
    with_backward = range(count - groups if schedule.passes else 0, 0 if schedule.name == "forward_only" else count)
    for number in range(microbatches):
        turned = schedule.lies_turned if number % 2 else None
        for stage, group in enumerate((turned or schedule.lies)(groups, chunks)):
            kinds: list[BlockKind] = ["F", "B"] if stage in with_backward else ["F"]
            found[group + ends] |= {TableCell(stage + ends, kind, number) for kind in kinds}
        if ends:
            found[0] |= {TableCell(stage, kind, number) for stage in (0, count + 1) for kind in ("F", "B")}
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_are_legal_wherever_they_exist(name: str) -> None:
    """For all small numbers; nothing is missing."""
    schedule, legal = SCHEDULES[name], 0
    for numbers in SMALL:
        if schedule.why_not(*numbers) is None:
            legal += 1
            check_chain(schedule.table(*numbers), rows_of(schedule, *numbers))
    assert legal >= 9


def _numbers(text: str) -> Numbers:
    match = re.fullmatch(r"(\d+) groups and (\d+) micro-batches(?:, (\d+) chunks on each group)?", text)
    assert match is not None, text
    return int(match[1]), int(match[2]), int(match[3] or 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_there_is_none_the_nearest_are_named(name: str) -> None:
    schedule, refused = SCHEDULES[name], 0
    for groups, microbatches, chunks in SMALL:
        if schedule.why_not(groups, microbatches, chunks) is None:
            continue
        refused += 1
        with pytest.raises(PlanError, match=f"there is no schedule '{name}' for {groups} groups and") as error:
            schedule.table(groups, microbatches, chunks)
        near = [_numbers(text) for text in str(error.value).split("the nearest: ")[1].split("; ")]
        assert near
        for numbers in near:
            check_chain(schedule.table(*numbers), rows_of(schedule, *numbers))
        own = [n for n in near if n[0] == groups]
        alike = [m for m in range(1, 60) if schedule.why_not(groups, m, near[0][2]) is None]
        assert bool(own) == bool(alike), "other groups are named only where these have no number of micro-batches"
        if own:
            assert min(abs(m - microbatches) for _, m, _ in own) == min(abs(m - microbatches) for m in alike)
    assert refused > 0 or schedule.chunks is None


def test_an_error_says_why_and_what_is_near() -> None:
    with pytest.raises(PlanError) as error:
        SCHEDULES["interleaved"].table(4, 6)
    assert str(error.value) == (
        "there is no schedule 'interleaved' for 4 groups and 6 micro-batches, 2 chunks on each group: micro-batches go in "
        "rounds of 4, one for each group; the nearest: 4 groups and 4 micro-batches, 2 chunks on each group; 4 groups and "
        "8 micro-batches, 2 chunks on each group"
    )
    with pytest.raises(PlanError, match="groups and micro-batches are positive; the nearest: 2 groups and 1 micro-batches"):
        SCHEDULES["1f1b"].table(2, 0)
    with pytest.raises(PlanError, match="a group has 1 of the model's chunks; the nearest: 2 groups and 4 micro-batches"):
        SCHEDULES["gpipe"].table(2, 4, 2)


def test_chunks_where_nobody_says_how_many() -> None:
    least = {name: schedule.chunks_of(None) for name, schedule in SCHEDULES.items()}
    assert {name: chunks for name, chunks in least.items() if chunks > 1} == {
        "interleaved": 2, "breadth_first": 2, "zb_v": 2, "dualpipe_v": 2, "3f1b": 3,
    }  # fmt: skip
    for schedule in SCHEDULES.values():
        assert schedule.example == schedule.table(2, 4)


# -- what is printed

MODULES = [importlib.import_module(f"jscaler.tables.{one.name}") for one in pkgutil.iter_modules(jscaler.tables.__path__)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_print_what_they_say(module: ModuleType) -> None:
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    made = {one.make.__name__ for one in SCHEDULES.values() if one.make.__module__ == module.__name__}
    assert made <= {test.name.rsplit(".", 1)[1] for test in examples}, "each schedule shows a table"
    said: list[str] = []
    for test in (
        one for one in examples if one.name.rsplit(".", 1)[1] not in jscaler.__all__
    ):  # test_public_names has those
        doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


numbers_of_some = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 14), st.integers(1, 3))


@given(numbers_of_some)
@drawn(200)
def test_text_and_csv_are_read_as_they_were_written(chosen: tuple[str, int, int, int]) -> None:
    name, *numbers = chosen
    if SCHEDULES[name].why_not(*numbers) is None:
        table = SCHEDULES[name].table(*numbers)
        assert Table.parse(str(table)) == table
        assert parse_csv(csv_text(table)) == table


cells = st.tuples(st.integers(0, 2), st.sampled_from("FRBIW"), st.integers(0, 3))


@given(st.lists(st.lists(cells, min_size=1, max_size=2)))
@drawn(200)
def test_micro_batches_under_way(entries: list[list[tuple[int, str, int]]]) -> None:
    """At an entry: all of which something has run, itself with it, and something runs here or behind it."""
    row = Table.parse(" ".join(f"({';'.join(f'{s}{k}{i}' for s, k, i in own)})" for own in entries)).rows
    numbers = [{i for *_, i in own} for own in entries]
    begun = [set().union(*numbers[: place + 1]) for place in range(len(numbers))]
    left = [set().union(*numbers[place:]) for place in range(len(numbers))]
    assert most_live(row[0] if row else ()) == max((len(a & b) for a, b in zip(begun, left, strict=True)), default=0)


def test_activations_are_held_until_the_last_that_reads_them() -> None:
    """B, or W; of a stage without a backward none, and of overlapped blocks one another's. They are made by F, or by R."""
    for text, most in {
        "0F0 0F1 0B0 0B1": 2,
        "0F0 0I0 0F1 0W0 0I1 0W1": 2,
        "0F0 0I0 0W0 0F1 0I1 0W1": 1,
        "0F0 2F0 0F1 2F1 2B0 2B1": 2,
        "0F0 (0F1;0B0) 0B1": 2,
        "0F0 0F1 0F2": 0,
        "0F0 0F1 0R0 0B0 0R1 0B1": 1,
        "0F0 0F1 0R0 0R1 0B0 0I1 0W1": 2,
        "0F0 0F1 0R1 0B0 0B1": 2,
    }.items():
        assert most_activations(Table.parse(text).rows[0]) == most, text


def test_a_schedule_of_one_s_own_is_one_of_these() -> None:
    """What is not legal by its own ``problem`` is not made."""
    odd = dataclasses.replace(SCHEDULES["gpipe"], name="odd", problem=lambda p, m, v: "even" if m % 2 == 0 else None)
    assert odd.table(2, 3) == SCHEDULES["gpipe"].table(2, 3)
    with pytest.raises(PlanError, match="'odd' for 2 groups and 4 micro-batches: even; the nearest: 2 groups and 3 micro"):
        odd.table(2, 4)
