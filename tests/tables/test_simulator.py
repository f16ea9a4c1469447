"""`simulate_table` against a simulation written another way: a clock, and devices and links that begin what they can."""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from of_the_day import drawn

from jscaler.errors import OrderError
from jscaler.tables import SCHEDULES, BlockKind, Entry, Table, TableCell, schedule_named
from jscaler.tables.simulator import idle, simulate_table
from jscaler.tables.tasks import Task, times_of
from jscaler.tables.timeline import Timeline

Times = dict[str, tuple[float, float]]
EVERY = [name + mark for name in sorted(SCHEDULES) for mark in ("", "+R")]


def needed(cell: TableCell) -> list[TableCell]:
    """What a block of a chain of stages reads; some of it a table may not have."""
    stage, i = cell.stage, cell.microbatch
    if cell.kind == "F":
        return [TableCell(stage - 1, "F", i)]
    if cell.kind == "W":
        return [TableCell(stage, "I", i)]
    if cell.kind == "R":
        return [TableCell(stage, "F", i)]
    return [TableCell(stage, "F", i), TableCell(stage, "R", i), TableCell(stage + 1, "B", i), TableCell(stage + 1, "I", i)]


class Clock:
    """Actors with a queue each, of what they do one after another; they look at theirs whenever something ends.

    A device does the entries of its rows; a link between two rows brings what the entries of the second need of the first.
    """

    def __init__(self, table: Table, seconds: Mapping[BlockKind, float], hop: float, devices: Sequence[Sequence[int]]):
        self.length: dict[str, float] = {}
        self.needs: dict[str, set[str]] = {}
        self.queues: dict[tuple[str, int, int], list[str]] = {}
        home = {c: (row, entry) for row, entries in enumerate(table.rows) for entry in entries for c in entry.cells}
        for row, entry in self._one_after_another(table, home, devices):
            self.length[str(entry)] = sum(seconds[c.kind] for c in entry.cells)
            before = {home[other] for c in entry.cells for other in needed(c) if other in home}
            self.needs[str(entry)] = {str(other) for source, other in before if source == row}
            for source, other in sorted(before, key=lambda pair: table.rows[pair[0]].index(pair[1])):
                if source != row:
                    send = f"{other} to {entry}"
                    self.length[send], self.needs[send] = hop, {str(other)}
                    self.needs[str(entry)].add(send)
                    self.queues.setdefault(("link", source, row), []).append(send)
            for device in devices[row]:
                self.queues.setdefault(("device", device, device), []).append(str(entry))

    def _one_after_another(
        self, table: Table, home: Mapping[TableCell, tuple[int, object]], devices: Sequence[Sequence[int]]
    ) -> list[tuple[int, Entry]]:
        """Rows start their entries round by round; of those that share a device one a round, the first row first. An R goes
        into the round of the entry before it, unless it needs another of that round."""
        at, done, found = [0] * len(table.rows), set(), []
        while sum(at) < sum(map(len, table.rows)):
            heads = [(row, entries[at[row]]) for row, entries in enumerate(table.rows) if at[row] < len(entries)]
            ready = [(r, e) for r, e in heads if all(c in done for o in e.cells for c in needed(o) if c in home)]
            assert ready, "they wait for each other"
            begun: list[int] = []
            for row, _ in ready:
                if not any(set(devices[row]) & set(devices[other]) for other in begun):
                    begun.append(row)
            ran = set[TableCell]()
            for row in begun:
                own = set[TableCell]()
                for entry in table.rows[row][at[row] :]:
                    again = all(c.kind == "R" and set(needed(c)) & set(home) <= done | own for c in entry.cells)
                    if own and not again:
                        break
                    found.append((row, entry))
                    at[row] += 1
                    own |= set(entry.cells)
                ran |= own
            done |= ran
        return found

    def run(self) -> Times:
        """When each entry and each send begins and ends."""
        busy: dict[tuple[str, int, int], float] = {}
        found: Times = {}
        ends = [0.0]
        while ends:
            now = heapq.heappop(ends)
            moved = True
            while moved:  # what takes no time may let others begin at once
                moved = False
                for own in list(self.queues.values()):
                    if own and self._begins(own[0], now, busy, found):
                        heapq.heappush(ends, found[own[0]][1])
                        self._start(own[0], found, busy)
                        moved = True
        assert not any(self.queues.values()), "something has never begun"
        return found

    def _begins(self, what: str, now: float, busy: Mapping[tuple[str, int, int], float], found: Times) -> bool:
        actors = [actor for actor, own in self.queues.items() if what in own[:1]]
        others = [actor for actor, own in self.queues.items() if what in own[1:]]
        ready = all(other in found and found[other][1] <= now for other in self.needs[what])
        if others or not ready or any(busy.get(actor, 0.0) > now for actor in actors):
            return False
        found[what] = now, now + self.length[what]
        return True

    def _start(self, what: str, found: Times, busy: dict[tuple[str, int, int], float]) -> None:
        for actor, own in self.queues.items():
            if own[:1] == [what]:
                own.pop(0)
                busy[actor] = found[what][1]


def both(table: Table, seconds: Mapping[BlockKind, float], hop: float, devices: Sequence[Sequence[int]]) -> Timeline:
    """Ours; it runs what the other does at the same times."""
    ours = simulate_table(table, seconds, hop, devices)
    theirs = Clock(table, seconds, hop, devices).run()
    assert {one.name: (one.begin, one.end) for one in ours.runs} == {k: own for k, own in theirs.items() if " to " not in k}
    assert ours.makespan == max(end for _, end in theirs.values())
    return ours


some_seconds = st.one_of(st.integers(0, 5).map(float), st.floats(0, 9, allow_nan=False))
kinds = st.fixed_dictionaries(dict.fromkeys(("F", "R", "B", "I", "W"), some_seconds))
hops = st.one_of(st.just(0.0), st.sampled_from([0.25, 1.0, 3.5]), st.floats(0, 9, allow_nan=False))


@given(st.sampled_from(EVERY), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), kinds, hops)
@drawn(1000)
def test_blocks_run_when_a_clock_lets_them(
    name: str, groups: int, microbatches: int, chunks: int, seconds: Mapping[BlockKind, float], hop: float
) -> None:
    schedule = schedule_named(name)
    assert schedule is not None
    chunks = schedule.chunks or max(chunks, 2)
    if schedule.why_not(groups, microbatches, chunks) is None:
        table = schedule.table(groups, microbatches, chunks)
        devices = [[*range(groups)], *([g] for g in range(groups))] if schedule.everywhere else [[g] for g in range(groups)]
        both(table, seconds, hop, devices)


@given(st.integers(1, 3), st.integers(1, 6), kinds, hops, st.data())
@drawn(100)
def test_groups_of_several_devices(
    groups: int, microbatches: int, seconds: Mapping[BlockKind, float], hop: float, data: st.DataObject
) -> None:
    """A row's devices run alike, and wait for each other where rows share some."""
    some = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
    devices = [data.draw(some) for _ in range(groups)]
    both(SCHEDULES["zb_h1"].table(groups, microbatches), seconds, hop, devices)


def test_a_link_takes_one_send_at_a_time() -> None:
    """The second activation, made a second later, waits until the first has arrived; blocks run beside both."""
    table = Table.parse("0F0 0F1 0F2\n1F0 1F1 1F2")
    timeline = both(table, {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}, 3.0, [[0], [1]])
    assert {one.name: one.begin for one in timeline.runs if one.devices == (1,)} == {"1F0": 4, "1F1": 7, "1F2": 10}
    assert [one.begin for one in timeline.runs if one.devices == (0,)] == [0, 1, 2]
    assert idle(timeline, 1) == 4


def test_a_hop_there_does_not_wait_for_one_back() -> None:
    """Each direction is a link of its own."""
    table = Table.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    timeline = both(table, {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}, 2.0, [[0], [1]])
    assert {one.name: one.begin for one in timeline.runs} == {
        "0F0": 0, "0F1": 1, "1F0": 3, "1B0": 4, "1F1": 5, "1B1": 6, "0B0": 7, "0B1": 9,
    }  # fmt: skip


def test_overlapped_blocks_take_as_long_as_both() -> None:
    timeline = both(
        Table.parse("0F0 (0F1;0B0) 0B1\n1F0 1B0 1F1 1B1"), {"F": 1.0, "B": 2.5, "I": 0, "W": 0}, 0.0, [[0], [1]]
    )
    pair = next(one for one in timeline.runs if len(one.cells) == 2)
    assert (pair.name, pair.begin, pair.end) == ("(0F1;0B0)", 4.5, 8)


def test_what_waits_for_itself_is_not_simulated() -> None:
    with pytest.raises(OrderError, match="blocks wait for each other: 0B0 waits for 1B0; 1F1 waits for 0F1"):
        simulate_table(Table.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))
    with pytest.raises(OrderError, match=r"\(0B0;0F0\) waits for \(0B0;0F0\)"):
        simulate_table(Table.parse("(0B0;0F0)"))


@pytest.mark.parametrize(("name", "makespan"), [("1f1b", 3 * (512 + 31)), ("zb_h1", 3 * 512 + 31)])
def test_many_stages_and_micro_batches(name: str, makespan: int) -> None:
    timeline = simulate_table(SCHEDULES[name].table(32, 512))
    assert timeline.makespan == makespan
    assert timeline.devices == list(range(32))
    assert timeline.busy(7) == 3 * 512
    assert len(timeline.runs) == 32 * 512 * (2 if name == "1f1b" else 3)


tasks_of_some = st.lists(
    st.tuples(st.sets(st.sampled_from("abc"), max_size=2), some_seconds, st.sets(st.integers(0, 20), max_size=3)),
    max_size=12,
)


@given(tasks_of_some)
@drawn(200)
def test_a_task_begins_as_soon_as_it_can(chosen: list[tuple[set[str], float, set[int]]]) -> None:
    """Not before what it reads is there and its places are free, and at the very end of one of these."""
    tasks = [Task((*places,), s, tuple(n for n in reads if n < i)) for i, (places, s, reads) in enumerate(chosen)]
    times = times_of(tasks)
    assert len(times) == len(tasks)
    for number, (task, (begin, end)) in enumerate(zip(tasks, times, strict=True)):
        before = [times[n][1] for n in task.waits]
        before += [times[n][1] for n in range(number) if not set(tasks[n].places).isdisjoint(task.places)]
        assert begin == max(before, default=0.0)
        assert end == begin + task.seconds


def test_timelines_sum_up_what_ran() -> None:
    """Of 1F1B on two groups of two devices: the busy time of each, the bubble of all, and which devices are alike."""
    timeline = simulate_table(SCHEDULES["1f1b"].table(2, 4), devices=[[0, 1], [2, 3]], name="ours")
    assert timeline.makespan == 15
    assert [timeline.busy(device) for device in range(4)] == [12.0] * 4
    assert math.isclose(timeline.bubble, 1 - 12 / 15)
    assert timeline.alike == [(0, 1), (2, 3)]
    assert [idle(timeline, device) for device in (0, 2)] == [3, 0]
    assert str(timeline).splitlines()[0] == "ours: 15 s, of which devices wait 20.0%"
    begins = [one.begin for one in timeline.runs]
    assert all(a <= b for a, b in itertools.pairwise(begins))
