"""Instructions of a step on several groups, replayed in a small interpreter on any legal table.

The interpreter knows slots and nothing else. What a block computes it takes for a number of all that the block reads, and
a sum for the sum of such numbers. The oracle works out each result from its definition, with no slots and no order.
"""

import dataclasses
import functools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from of_the_day import drawn

import jscaler
from jscaler import PlanError, plans
from jscaler.errors import OrderError
from jscaler.lower.instructions import Gather, Instruction, Instructions, Run, Send, instructions, microbatch_text
from jscaler.lower.loop_blocks import sums_of
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.spanning_loop import Transfer
from jscaler.lower.step_plan import StepPlan
from jscaler.tables import Entry, Overlap, Table, TableCell

MICROBATCHES = 4
PRIME = 2**61 - 1


def train_step(state: Any, x: jax.Array) -> Any:
    """Tied weights, a running mean that goes from micro-batch to micro-batch, a result for each row, a norm of all."""
    params, running = state

    def loss_of(params: Any) -> Any:
        with jax.named_scope("first"):
            h = jnp.tanh(x @ params["tied"])
        with jax.named_scope("norm"):
            mean = h.mean(0)
            new = 0.9 * running + 0.1 * mean
            h = h - mean
        with jax.named_scope("second"):
            h = jnp.tanh(h @ params["w"])
        with jax.named_scope("third"):
            rows = h @ params["tied"].T
            return jnp.mean(rows**2), (new, rows)

    (loss, (running, rows)), grads = jscaler.value_and_grad(loss_of, has_aux=True)(params)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    return (jax.tree.map(lambda p, g: p - g / norm, params, grads), running), loss, rows


def plain_step(params: Any, x: jax.Array) -> Any:
    """Four layers in a row."""

    def loss_of(params: Any) -> jax.Array:
        h = x
        for name in sorted(params):
            with jax.named_scope(name):
                h = jnp.tanh(h @ params[name])
        return jnp.mean(h**2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def stacked_step(params: Any, x: jax.Array) -> Any:
    """Two layers of a stack in each stage, and ends."""

    def loss_of(params: Any) -> jax.Array:
        h = jnp.tanh(x @ params["first"])
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0]
        return jnp.mean((h @ params["last"]) ** 2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, its arguments, and how it is cut; ``in_order`` are stages whose forwards wait for the micro-batch before."""

    step: Callable[..., Any]
    arguments: Callable[[], Any]
    policy: Callable[[], Any]
    devices: int
    in_order: tuple[int, ...] = ()


def trained() -> Any:
    return ({"tied": jnp.ones((4, 6)), "w": jnp.ones((6, 6))}, jnp.zeros(6)), jnp.ones((8, 4))


def layers() -> Any:
    return {f"layer_{i}": jnp.ones((4, 4)) for i in range(4)}, jnp.ones((8, 4))


def stacked() -> Any:
    return {"first": jnp.ones((4, 4)), "layers": jnp.ones((4, 4, 4)), "last": jnp.ones((4, 4))}, jnp.ones((8, 4))


def trained_by(table: str) -> Any:
    return plans.pipeline(3, MICROBATCHES, table, at=["second", "third"], batch="x", per_microbatch="norm")


CASES = {
    "whole backwards": Case(train_step, trained, lambda: trained_by("1f1b"), 3, (0,)),
    "halves": Case(train_step, trained, lambda: trained_by("zb_h1"), 3, (0,)),
    "stages side by side": Case(plain_step, layers, lambda: plans.pipeline(2, MICROBATCHES, "zb_v", batch="x"), 2),
    "two directions": Case(plain_step, layers, lambda: plans.pipeline(2, MICROBATCHES, "chimera", batch="x"), 2),
    "ends": Case(stacked_step, stacked, lambda: plans.pipeline(2, MICROBATCHES, batch="x"), 2),
}


@functools.cache
def planned(name: str) -> StepPlan:
    case = CASES[name]
    return jscaler.parallelize(case.policy(), devices=case.devices)(case.step).lower(*case.arguments()).plan


@functools.cache
def blocks_of(name: str) -> tuple[PlacedBlock, ...]:
    """The blocks of the segments, in the order in which a group runs them."""
    plan = planned(name)
    number = {group: n for n, group in enumerate(plan.completed.groups)}
    every = [block for segment in plan.segments for block in segment.blocks]
    return tuple(sorted(every, key=lambda block: (block.phase, number[block.group], block.level, block.of_layers)))


def written(name: str, table: Table | None = None) -> tuple[list[PlacedBlock], Instructions]:
    """The instructions of a case on ``table``; on its own without one."""
    plan = planned(name)
    asked = plan.instructions.table if table is None else table
    return instructions(plan.graph, blocks_of(name), plan.transfers, plan.spanning, len(plan.graph.outputs), asked)


def table_of(name: str) -> Table:
    table = planned(name).instructions.table
    assert table is not None
    return table


# -- random legal tables


def random_table(rng: random.Random, name: str) -> Table:
    """The cells of a case's table in any legal order; the halves of some backwards are whole."""
    rows = table_of(name).rows
    cells = [(number, cell) for number, row in enumerate(rows) for entry in row for cell in entry.cells]
    whole = {(c.stage, c.microbatch) for _, c in cells if c.kind == "I" and rng.random() < 0.4}
    left = [(n, dataclasses.replace(c, kind="B")) for n, c in cells if c.kind == "I" and (c.stage, c.microbatch) in whole]
    left += [(n, c) for n, c in cells if c.kind not in "IW" or (c.stage, c.microbatch) not in whole]
    every, ran = {cell for _, cell in left}, set[TableCell]()
    entries: list[list[Entry]] = [[] for _ in rows]
    while left:
        number, cell = rng.choice([pair for pair in left if waits_for(pair[1], CASES[name].in_order) & every <= ran])
        left.remove((number, cell))
        ran.add(cell)
        entries[number].append(cell)
    return Table(tuple(map(tuple, entries)))


def waits_for(cell: TableCell, in_order: Sequence[int]) -> set[TableCell]:
    stage, i = cell.stage, cell.microbatch
    if cell.kind == "F":
        return {TableCell(stage - 1, "F", i)} | ({TableCell(stage, "F", i - 1)} if stage in in_order else set())
    if cell.kind == "W":
        return {TableCell(stage, "I", i)}
    return {TableCell(stage, "F", i), TableCell(stage + 1, "B", i), TableCell(stage + 1, "I", i)}


def with_overlaps(rng: random.Random, table: Table, in_order: Sequence[int]) -> Table:
    """Some neighbours as one executable, but for two forwards of which one waits for the state that the other leaves."""
    rows = []
    for row in table.rows:
        entries = list(row)
        place = rng.randrange(len(entries) - 1)
        pair = (*entries[place].cells, *entries[place + 1].cells)
        if not all(cell.kind == "F" and cell.stage in in_order for cell in pair):
            entries[place : place + 2] = [Overlap(pair)]
        rows.append(tuple(entries))
    return Table(tuple(rows))


# -- the oracle, and the interpreter


def number_of(*terms: object) -> int:
    return hash(terms) % PRIME


class Meaning:
    """What every value of a step is by definition."""

    def __init__(self, name: str):
        plan = planned(name)
        assert plan.spanning is not None
        self.spanning, self.transfers, self.blocks = plan.spanning, plan.transfers, blocks_of(name)
        self.phases, self.length = plan.spanning.phases, plan.spanning.loop.length
        body = [block for block in self.blocks if block.phase in self.phases]
        self.sums = sums_of(body, plan.spanning)
        self.carries = {carry.inside: carry for carry in plan.spanning.carries}
        self.added = {c.out: c.inside for c in plan.spanning.carries if c.inside in self.sums}
        self.finals = {carry.final: carry for carry in plan.spanning.carries}
        self.stacks = {stacked.stack: stacked.piece for stacked in plan.spanning.stacks}
        self.arrives = {transfer.target: transfer for transfer in plan.transfers}
        self.maker = {v: b for b in self.blocks for v in (*b.exports, *b.results) if v not in self.added}
        self.repeated = {v for block in body for v in block.exports} | {*plan.spanning.indices}
        self.repeated |= {t.target for t in plan.transfers if t.phase in self.phases}
        self.repeated |= self.carries.keys() - self.sums

    def of(self, value: int, iteration: int | None) -> int:
        if value in self.spanning.indices:
            assert iteration is not None
            return iteration * len(self.phases) + self.spanning.indices[value]
        if value in self.arrives:
            return self.of(self.arrives[value].source, iteration)
        if value in self.carries:  # a state: sums are read by those who add to them
            assert value not in self.sums
            carry = self.carries[value]
            return self.of(carry.out, iteration - 1) if iteration else self.of(carry.init, None)
        if value in self.finals:
            carry = self.finals[value]
            return self.total(carry.inside) if carry.inside in self.sums else self.of(carry.out, self.length - 1)
        if value in self.stacks:
            return number_of("stack", *(self.of(self.stacks[value], i) for i in range(self.length)))
        block = self.maker[value]
        iteration = iteration if block.phase in self.phases else None
        reads = {v: self.of(v, iteration) for v in block.imports if v not in self.sums}
        return self.term_of(block, value, iteration, reads)

    def total(self, inside: int) -> int:
        """A sum behind the loop: what it begins with, and what each block adds for each micro-batch."""
        carry, amount = self.carries[inside], self.of(self.carries[inside].init, None)
        for block in self.blocks:
            for i in range(self.length) if carry.out in block.exports else ():
                reads = {v: self.of(v, i) for v in block.imports if v not in self.sums}
                amount += self.term_of(block, carry.out, i, reads)
        return amount % PRIME

    def term_of(self, block: PlacedBlock, value: int, iteration: int | None, reads: Mapping[int, int]) -> int:
        """What a block makes; of a sum what it adds."""
        assert not reads.keys() & self.sums
        return number_of(id(block), value, iteration, *sorted(reads.items()))

    def run(self, block: PlacedBlock, run: Run, reads: Sequence[int]) -> list[int]:
        """What an executable leaves of what it reads: its parts run one after another."""
        iterations = [number // len(self.phases) for number in run.microbatches] or [None]
        for place, number in enumerate(run.microbatches):
            assert self.spanning.microbatch(block.phase, iterations[place] or 0) == number
        sums = {v: term for (v, _), term in zip(block.taken, reads, strict=True) if v in self.sums}
        whole = {v: term for (v, _), term in zip(block.taken, reads, strict=True) if v not in self.repeated}
        values = dict(zip(block.taken, reads, strict=True))
        for part, place in block.parts or ((block, 0),):
            iteration = iterations[place] if part.phase in self.phases else None
            terms = {v: values[v, place] if (v, place) in values else whole[v] for v in part.imports if v not in self.sums}
            for v in (*part.results, *part.exports):
                term = self.term_of(part, v, iteration, terms)
                if v in self.added:
                    term = sums[self.added[v]] = (sums[self.added[v]] + term) % PRIME
                values[v, place] = term
        ends = [*((v, 0) for v in block.results), *block.left]
        return [sums[self.added[v]] if v in self.added else values[v, place] for v, place in ends]


class Slots:
    """Slots that can be written once, read until they are freed, and freed once."""

    def __init__(self, counts: Mapping[int, tuple[int, int]]):
        self.held = {slot: number for slot, (_, number) in counts.items()}
        self.freed: set[int] = set()

    def read(self, slot: int) -> int:
        assert slot not in self.freed, f"slot {slot} is read after it was freed"
        assert slot in self.held, f"slot {slot} is read before it is written"
        return self.held[slot]

    def write(self, slot: int, term: int) -> None:
        assert slot not in self.held, f"slot {slot} is written twice"
        self.held[slot] = term

    def free(self, slot: int) -> None:
        assert slot in self.held, f"slot {slot} is freed before it is written"
        assert slot not in self.freed, f"slot {slot} is freed twice"
        self.freed.add(slot)


def ends_of(step: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots that an instruction reads, and those that it writes."""
    if isinstance(step, Run):
        return step.reads, step.writes
    return ((step.source,) if isinstance(step, Send) else step.pieces), (step.target,)


def replayed(blocks: Sequence[PlacedBlock], steps: Instructions, meaning: Meaning, results: int) -> list[int]:
    """The results that the instructions leave; raises AssertionError for a slot that is used wrongly."""
    slots = Slots(steps.counts)
    for step in steps.steps:
        reads, writes = ends_of(step)
        terms = [slots.read(slot) for slot in reads]
        if isinstance(step, Run):
            left = meaning.run(blocks[step.block], step, terms)
        else:
            left = terms if isinstance(step, Send) else [number_of("stack", *terms)]
        for slot, term in zip(writes, left, strict=True):
            slots.write(slot, term)
        for slot in step.freed:
            slots.free(slot)
    assert slots.held.keys() == set(range(steps.slots)), "a slot is never written"
    assert slots.held.keys() - slots.freed == set(range(results)), "a slot is never freed, or a result is"
    return [slots.held[number] for number in range(results)]


def check(name: str, table: Table | None = None) -> tuple[list[PlacedBlock], Instructions]:
    """The instructions of a case on ``table``: they leave what they should."""
    blocks, steps = written(name, table)
    meaning, results = Meaning(name), len(planned(name).graph.outputs)
    assert replayed(blocks, steps, meaning, results) == [meaning.of(number, None) for number in range(results)]
    return blocks, steps


# -- what instructions are


@pytest.mark.parametrize("name", CASES)
def test_every_slot_is_written_then_read_then_freed_and_results_are_what_they_should_be(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 2**32 - 1))
@drawn(24, one_in=4)
def test_so_it_is_on_any_legal_table(name: str, seed: int) -> None:
    check(name, random_table(random.Random(seed), name))


@pytest.mark.parametrize("name", ["whole backwards", "halves"])
@given(seed=st.integers(0, 2**32 - 1))
@drawn(24, one_in=4)
def test_so_it_is_where_blocks_are_one_executable(name: str, seed: int) -> None:
    rng = random.Random(seed)
    table = with_overlaps(rng, random_table(rng, name), CASES[name].in_order)
    try:
        blocks, steps = check(name, table)
    except OrderError:
        return  # of two groups each waits for the other's second block
    assert any(len(block.parts) > 1 for block in blocks)
    assert table == steps.table


@pytest.mark.parametrize("name", CASES)
def test_a_slot_is_freed_by_its_last_reader(name: str) -> None:
    _, steps = written(name)
    last = {slot: place for place, step in enumerate(steps.steps) for ends in ends_of(step) for slot in ends}
    freed = {slot: place for place, step in enumerate(steps.steps) for slot in step.freed}
    assert freed == {slot: place for slot, place in last.items() if slot >= len(planned(name).graph.outputs)}


def halves(cells: Sequence[TableCell]) -> Counter[TableCell]:
    """Cells, with both halves in the place of a whole backward."""
    kinds = {"B": "IW"}
    return Counter(dataclasses.replace(cell, kind=kind) for cell in cells for kind in kinds.get(cell.kind, cell.kind))


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 2**32 - 1))
@drawn(24, one_in=4)
def test_every_block_runs_once_for_each_micro_batch_in_the_order_of_the_table(name: str, seed: int) -> None:
    table = random_table(random.Random(seed), name)
    blocks, steps = written(name, table)
    spanning = planned(name).spanning
    assert spanning is not None
    runs = [step for step in steps.steps if isinstance(step, Run)]
    ran = Counter(
        (id(part), run.microbatches[place] if run.microbatches else None)
        for run in runs
        for part, place in blocks[run.block].parts or ((blocks[run.block], 0),)
    )
    wanted = Counter[tuple[int, int | None]]()
    for block in blocks_of(name):
        inside = block.phase in spanning.phases
        times = [spanning.microbatch(block.phase, i) for i in range(spanning.loop.length)] if inside else [None]
        wanted.update((id(block), microbatch) for microbatch in times)
    assert ran == wanted
    by_group: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        if run.microbatches:
            by_group[blocks[run.block].group].append(run)
    for row in table.rows:
        places = {half: n for n, entry in enumerate(row) for half in halves(entry.cells)}
        (lane,) = (
            group
            for group, lane_runs in by_group.items()
            if {c for run in lane_runs for c in halves(steps.cells(run))} <= places.keys()
        )
        told = [halves(steps.cells(run)) for run in by_group[lane]]
        first = [min(places[cell] for cell in cells) for cells in told if cells]
        assert first == sorted(first), "runs are not in the order of the row"
        stands = sum(told, Counter[TableCell]())
        assert set(stands.values()) == {1}, "two runs stand for one cell"
        kinds = {(cell.stage, cell.kind) for cell in stands}
        assert stands.keys() == {cell for cell in places if (cell.stage, cell.kind) in kinds}
        assert {cell.kind for cell in places.keys() - stands.keys()} <= {"I"}, (
            "a first stage makes no gradient of its input"
        )


@pytest.mark.parametrize("name", CASES)
def test_a_send_leads_from_one_group_to_another_once_for_each_micro_batch(name: str) -> None:
    plan = planned(name)
    _, steps = written(name)
    assert plan.spanning is not None
    sends = [step for step in steps.steps if isinstance(step, Send)]
    for send in sends:
        transfer: Transfer = plan.transfers[send.transfer]
        ends = transfer.crossing.source.mesh, transfer.crossing.target.mesh
        assert ends[0].devices != ends[1].devices
        assert (send.microbatch is not None) == (transfer.phase in plan.spanning.phases)
    assert set(Counter((send.transfer, send.microbatch) for send in sends).values()) == {1}


def test_what_an_executable_hands_on_inside_has_no_slot() -> None:
    """A table with whole backwards, where halves are blocks: what the first leaves for the second alone stays inside."""
    blocks, steps = written("halves", table_of("whole backwards"))
    assert {len(block.parts) for block in blocks if block.phase == 1} == {0, 2}
    assert {name for number, block in enumerate(blocks) if block.parts for name in steps.names[number]} == {(1, "B")}
    assert steps.slots < written("halves")[1].slots


def test_an_end_runs_with_its_layers_and_stands_for_no_cell() -> None:
    blocks, steps = written("ends")
    assert steps.ends
    for number in steps.ends:
        assert not blocks[number].of_layers
        runs = [step for step in steps.steps if isinstance(step, Run) and step.block == number]
        assert len(runs) == MICROBATCHES
        assert [steps.cells(run) for run in runs] == [[]] * MICROBATCHES
        assert steps.names[number], "it has a name all the same"


def test_a_stack_is_gathered_of_all_iterations_in_their_order() -> None:
    """Whatever the order in which they ran."""
    rows = [
        "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0",
        "1F3 1F2 1F1 1F0 1B3 1B2 1B1 1B0",
        "2F3 2B3 2F2 2B2 2F1 2B1 2F0 2B0",
    ]
    last_first = Table.parse("\n".join(rows))
    _, steps = check("whole backwards", last_first)
    (gather,) = (step for step in steps.steps if isinstance(step, Gather))
    at = {slot: run.microbatch for run in steps.steps if isinstance(run, Run) for slot in run.writes}
    assert [at[slot] for slot in gather.pieces] == [0, 1, 2, 3]
    runs = [run.microbatch for run in steps.steps if isinstance(run, Run) and set(run.writes) & set(gather.pieces)]
    assert runs == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("0F0 0B0\n1F0 1B0", PlanError, "the table has 2 rows, and the loop's ops lie on 3 device groups"),
        ("{0}\n{2}\n{1}", PlanError, "row 1 of the table"),
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n2F1 2F0 2B1 2B0 2F2 2B2 2F3 2B3",
            OrderError,
            "1B0",
        ),
    ],
)
def test_a_table_that_does_not_go_with_the_blocks_is_refused(text: str, error: type[Exception], match: str) -> None:
    rows = str(table_of("whole backwards")).splitlines()
    with pytest.raises(error, match=match):
        written("whole backwards", Table.parse(text.format(*rows)))


def test_ops_in_order_run_so() -> None:
    """A pair of an op and a micro-batch that is to run before another does, or it is said that it cannot."""
    plan = planned("stages side by side")
    forward = next(op.path for op in plan.graph.ops if op.path.startswith("layer_0/dot"))

    def runs_of(*before: Any) -> list[int | None]:
        pair = instructions(
            plan.graph,
            blocks_of("stages side by side"),
            plan.transfers,
            plan.spanning,
            len(plan.graph.outputs),
            None,
            before,
        )
        steps = pair[1]
        return [
            s.microbatch
            for s in steps.steps
            if isinstance(s, Run) and TableCell(0, "F", s.microbatch or 0) in steps.cells(s)
        ]

    assert runs_of() == [0, 1, 2, 3]
    order = runs_of(((forward, 1), (forward, 0)), ((forward, 3), (forward, 2)))
    assert (order.index(1) < order.index(0), order.index(3) < order.index(2)) == (True, True)
    with pytest.raises(OrderError, match="blocks wait for each other"):
        runs_of(((forward, 1), (forward, 0)), ((forward, 0), (forward, 1)))
    with pytest.raises(OrderError, match="'nowhere' runs in no block of the loop over micro-batches"):
        runs_of((("nowhere", 0), (forward, 0)))


# -- steps without a loop over groups


def towers(left: Any, right: Any) -> Any:
    """Two rows of ops that cross over, and back."""
    with jax.named_scope("left"):
        a = jnp.tanh(left["x"] @ left["w"])
    with jax.named_scope("right"):
        b = jnp.tanh(right["x"] @ right["w"])
        c = jnp.tanh(a @ b)
    with jax.named_scope("left_again"):
        return jnp.tanh(b @ c), c


@pytest.fixture(scope="module")
def straight() -> StepPlan:
    def policy(graph: Any, devices: Any) -> None:
        for scope, device in (("left", 0), ("right", 1), ("left_again", 0)):
            graph.on_devices(graph.select(f"{scope}/*"), devices[device : device + 1])

    given = {"x": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}
    return jscaler.parallelize(policy, devices=2)(towers).lower(given, given).plan


def test_without_a_loop_levels_follow_each_other(straight: StepPlan) -> None:
    every = [block for segment in straight.segments for block in segment.blocks]
    blocks, steps = instructions(straight.graph, every, straight.transfers, None, len(straight.graph.outputs))
    assert blocks == every
    assert (steps.table, steps.names, steps.counts) == (None, {}, {})
    runs = [step for step in steps.steps if isinstance(step, Run)]
    assert sorted(run.block for run in runs) == list(range(len(every)))
    levels = [every[run.block].level for run in runs]
    assert levels == sorted(levels)
    assert len(set(levels)) == 3
    held: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, step in enumerate(steps.steps):
        reads, writes = ends_of(step)
        assert all(slot in held and slot not in last for slot in reads)
        held.update(dict.fromkeys(writes, place))
        last.update(dict.fromkeys(step.freed, place))
    assert set(held) == set(range(steps.slots))
    assert held.keys() - last.keys() == {0, 1}


def test_nothing_runs_without_blocks(straight: StepPlan) -> None:
    assert instructions(straight.graph, [], [], None, 0) == ([], Instructions((), 0, {}))


def test_how_micro_batches_are_told_of() -> None:
    assert [microbatch_text(numbers) for numbers in ([], [3], [3, 1])] == ["", "micro-batch 3", "micro-batches 3 and 1"]
    assert (Run(0, (), ()).microbatch, Run(0, (), (), (2, 5)).microbatch) == (None, 2)
