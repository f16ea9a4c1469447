"""Which tables are legal: `check_chain` against rules written down as they are said, on random tables, some damaged.

Small legal ones are run, too: what is legal trains as one device does.
"""

import dataclasses
import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from of_the_day import drawn, of_the_day
from tables.chains import check_chain

import jscaler
from bench.schedules import out_of_order
from jscaler import PlanError, plans
from jscaler.errors import OrderError
from jscaler.lower.instructions import Run
from jscaler.lower.step_plan import StepPlan
from jscaler.tables import BlockKind, Entry, Overlap, Table, TableCell
from jscaler.tables.legal import whole_of
from jscaler.tables.table import most_live


@dataclasses.dataclass
class Asked:
    """A table, and the blocks that its rows should have."""

    rows: list[list[Entry]]
    wanted: list[set[TableCell]]

    @property
    def table(self) -> Table:
        return Table(tuple(map(tuple, self.rows)))


# -- the rules as they are said


def judged(asked: Asked) -> str:
    """What is wrong: "rows", "blocks" of a row, "circle"; or "legal"."""
    if len(asked.rows) != len(asked.wanted):
        return "rows"
    for row, wanted in zip(asked.rows, asked.wanted, strict=True):
        if not each_once([cell for entry in row for cell in entry.cells], wanted):
            return "blocks"
    return "legal" if all_can_run(asked.rows) else "circle"


def each_once(cells: list[TableCell], wanted: set[TableCell]) -> bool:
    """Every block of ``wanted`` stands there once, a B maybe as its I and its W, an R maybe not; and nothing else does."""
    left = list(cells)
    for block in wanted:
        halves = [dataclasses.replace(block, kind="I"), dataclasses.replace(block, kind="W")]
        optional = block.kind == "R" and block not in left
        for way in [[block], *([halves] if block.kind == "B" else []), *([[]] if optional else [])]:
            if all(left.count(cell) == 1 for cell in way):
                left = [cell for cell in left if cell not in way]
                break
        else:
            return False
    return not left


def under_way(row: Sequence[Entry], place: int) -> set[int]:
    """The micro-batches that have begun up to an entry, and of which it, or one behind it, runs something."""
    begun = {cell.microbatch for entry in row[: place + 1] for cell in entry.cells}
    return begun & {cell.microbatch for entry in row[place:] for cell in entry.cells}


def all_can_run(rows: Sequence[Sequence[Entry]]) -> bool:
    """Groups run the next entry of their row as long as any can, its blocks in their order; in the end nothing is left."""
    every = {cell for row in rows for entry in row for cell in entry.cells}
    left, ran = [list(row) for row in rows], set[TableCell]()
    moved = True
    while moved:
        moved = False
        for row in left:
            own = row[0].cells if row else ()
            if row and all(read_by(cell) & every <= ran | set(own[:n]) for n, cell in enumerate(own)):
                ran |= set(own)
                row.pop(0)
                moved = True
    return not any(left)


def read_by(cell: TableCell) -> set[TableCell]:
    """What a block of a chain reads of other blocks, if there are such."""
    s, i = cell.stage, cell.microbatch
    if cell.kind == "F":
        return {TableCell(s - 1, "F", i)}
    if cell.kind == "W":
        return {TableCell(s, "I", i)}
    if cell.kind == "R":
        return {TableCell(s, "F", i)}
    return {TableCell(s, "F", i), TableCell(s, "R", i), TableCell(s + 1, "B", i), TableCell(s + 1, "I", i)}


# -- random tables, and what may be wrong with them


def random_table(rng: random.Random, groups: int, microbatches: int, stages: int, turned: bool, frozen: int = 0) -> Asked:
    """A legal table: at each time any block that can run is next on its group. ``frozen`` first stages go forward alone,
    some others compute again, for some micro-batches in blocks of their own."""
    places = [[*range(groups), *(rng.randrange(groups) for _ in range(stages - groups))] for _ in range(2)]
    for own in places:
        rng.shuffle(own)
    halved: set[tuple[int, int]] = set()
    share, apart = rng.choice([0, 0.5, 1]), rng.choice([0, 0, 0.5, 1])
    again = {s for s in range(frozen, stages) if rng.random() < apart}
    wanted = [set[TableCell]() for _ in range(groups)]
    left: list[tuple[int, TableCell]] = []
    for s, i in itertools.product(range(stages), range(microbatches)):
        group = places[i % 2 if turned else 0][s]
        wanted[group] |= {TableCell(s, "F", i)} | ({TableCell(s, "B", i)} if s >= frozen else set())
        wanted[group] |= {TableCell(s, "R", i)} if s in again else set()
        halved |= {(s, i)} if rng.random() < share else set()
        kinds: list[BlockKind] = ["F"] if s < frozen else ["F", "I", "W"] if (s, i) in halved else ["F", "B"]
        kinds += ["R"] if s in again and (i == 0 or rng.random() < 0.5 + apart / 2) else []
        left += [(group, TableCell(s, kind, i)) for kind in kinds]
    every, ran = {cell for _, cell in left}, set[TableCell]()
    rows: list[list[Entry]] = [[] for _ in range(groups)]
    while left:
        group, cell = rng.choice([own for own in left if read_by(own[1]) & every <= ran])
        left.remove((group, cell))
        ran.add(cell)
        rows[group].append(cell)
    return Asked(rows, wanted)


def overlapped(rng: random.Random, asked: Asked) -> None:
    """Some neighbours of a row become one executable; they may then wait for each other."""
    for row in asked.rows:
        for _ in range(rng.randrange(3)):
            if len(row) > 1:
                place = rng.randrange(len(row) - 1)
                row[place : place + 2] = [Overlap((*row[place].cells, *row[place + 1].cells))]


def changed(cell: TableCell, rng: random.Random) -> TableCell:
    """Another stage, another kind or another micro-batch."""
    kind: BlockKind = rng.choice(("F", "R", "B", "I", "W"))
    others = [dataclasses.replace(cell, stage=cell.stage + 1), dataclasses.replace(cell, kind=kind)]
    return rng.choice([*others, dataclasses.replace(cell, microbatch=cell.microbatch + 1)])


def swap(rng: random.Random, rows: list[list[Entry]]) -> None:
    row = rng.choice(rows)
    if row:
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        row[a], row[b] = row[b], row[a]


def move(rng: random.Random, rows: list[list[Entry]]) -> None:
    """To another place of its row, or to another row."""
    source, target = rng.choice(rows), rng.choice(rows)
    if source:
        entry = source.pop(rng.randrange(len(source)))
        target.insert(rng.randint(0, len(target)), entry)


def drop(rng: random.Random, rows: list[list[Entry]]) -> None:
    row = rng.choice(rows)
    if row:
        row.pop(rng.randrange(len(row)))


def repeat(rng: random.Random, rows: list[list[Entry]]) -> None:
    row = rng.choice(rows)
    if row:
        row.insert(rng.randint(0, len(row)), rng.choice(row))


def change(rng: random.Random, rows: list[list[Entry]]) -> None:
    row = rng.choice(rows)
    if row:
        place = rng.randrange(len(row))
        first, *more = row[place].cells
        new = changed(first, rng)
        row[place] = Overlap((new, *more)) if more else new


def halve(rng: random.Random, rows: list[list[Entry]]) -> None:
    """A B as I and W, where it stands; W maybe first, which cannot be."""
    at = [(row, n) for row in rows for n, entry in enumerate(row) if isinstance(entry, TableCell) and entry.kind == "B"]
    if at:
        row, place = rng.choice(at)
        cell = row[place].cells[0]
        row[place : place + 1] = [dataclasses.replace(cell, kind=kind) for kind in rng.choice(("IW", "WI"))]


def swap_rows(rng: random.Random, rows: list[list[Entry]]) -> None:
    a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
    rows[a], rows[b] = rows[b], rows[a]


def turn_around(rng: random.Random, rows: list[list[Entry]]) -> None:
    rng.choice(rows).reverse()


def row_more_or_less(rng: random.Random, rows: list[list[Entry]]) -> None:
    if rng.random() < 0.5:
        rows.append([])
    else:
        rows.pop()


DAMAGES: Sequence[Callable[[random.Random, list[list[Entry]]], None]] = [
    swap, swap, move, move, halve, halve, drop, repeat, change, swap_rows, turn_around, row_more_or_less,
]  # fmt: skip


def random_asked(seed: int) -> Asked:
    """A table of up to four groups and five micro-batches, as it is or damaged up to three times."""
    rng = random.Random(seed)
    groups = rng.randint(1, 4)
    stages = groups * rng.randint(1, 2) + rng.randint(0, 1)
    frozen = rng.choice([0, 0, rng.randint(0, stages)])
    asked = random_table(rng, groups, rng.randint(1, 5), stages, rng.random() < 0.3, frozen)
    if rng.random() < 0.4:
        overlapped(rng, asked)
    for damage in rng.choices(DAMAGES, k=rng.choice([0, 0, 1, 1, 2, 3])):
        if asked.rows:
            damage(rng, asked.rows)
    return asked


def told(asked: Asked) -> str:
    """What `check_chain` says of it, in the words of `judged`."""
    try:
        check_chain(asked.table, asked.wanted)
    except OrderError:
        return "circle"
    except PlanError as error:
        return "rows" if str(error).startswith("the table has") else "blocks"
    return "legal"


@pytest.mark.one_day_in(2)
@given(st.integers(0, 2**32 - 1))
@drawn(10_000, one_in=10)
def test_tables_are_judged_by_the_rules(seed: int) -> None:
    asked = random_asked(seed)
    assert told(asked) == judged(asked), f"{asked.table}\n{asked.wanted}"
    for row in asked.rows:
        assert most_live(row) == max((len(under_way(row, place)) for place in range(len(row))), default=0), f"{asked.table}"


@pytest.mark.one_day_in(3)
def test_the_random_tables_are_of_all_sorts() -> None:
    found = Counter(judged(random_asked(seed)) for seed in range(1000))
    assert {sort: count >= 40 for sort, count in found.items()} == dict.fromkeys(
        ("legal", "rows", "blocks", "circle"), True
    )
    assert 250 <= found["legal"] <= 600


@given(st.integers(0, 2**32 - 1))
@drawn(400)
def test_damaged_rows_are_named_with_their_cells(seed: int) -> None:
    """Of the first row that is wrong: its number, and what it lacks, has twice, and has without being asked for."""
    asked = random_asked(seed)
    if judged(asked) != "blocks":
        return
    with pytest.raises(PlanError) as error:
        check_chain(asked.table, asked.wanted)
    found = {n: [c for entry in row for c in entry.cells] for n, row in enumerate(asked.rows)}
    row = next(n for n, cells in found.items() if not each_once(cells, asked.wanted[n]))
    beginning, text = f"row {row} of the table, that of group {row}, ", str(error.value)
    assert text.startswith(beginning)
    said = {}
    for part in text.removeprefix(beginning).split("; "):
        what, names = part.split(" '", 1)
        said[what] = re.findall(r"'(\w+)", f"'{names}")
    wrong = what_is_wrong(found[row], asked.wanted[row])
    assert said == {what: list(map(str, sorted(own)[:6])) for what, own in wrong.items() if own}


def what_is_wrong(cells: list[TableCell], wanted: set[TableCell]) -> dict[str, set[TableCell]]:
    """Of a B whose I or W stands there, the halves are asked for; no R is."""
    asked = set[TableCell]()
    for block in wanted:
        halves = {dataclasses.replace(block, kind="I"), dataclasses.replace(block, kind="W")}
        asked |= halves if block.kind == "B" and not halves.isdisjoint(cells) else {block}
    asked -= {block for block in asked if block.kind == "R" and block not in cells}
    twice = {cell for cell in cells if cells.count(cell) > 1}
    return {"lacks": asked - set(cells), "has twice": twice, "has": set(cells) - asked}


# -- what errors say


def chain(stages: int, microbatches: int) -> list[set[TableCell]]:
    """A stage on each group."""
    return [{TableCell(s, k, i) for k in ("F", "B") for i in range(microbatches)} for s in range(stages)]


MISTAKES = {
    "0F0 0B0 0F1\n1F0 1B0 1F1 1B1": "row 0 of the table, that of group 0, lacks '0B1'",
    "0F0 0B0 0F1 0B1 0F1\n1F0 1B0 1F1 1B1": "row 0 of the table, that of group 0, has twice '0F1'",
    "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1 0F0": "row 1 of the table, that of group 1, has '0F0 of group 0'",
    "0F0 0R0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1": ("row 0 of the table, that of group 0, has '0R0, which does not run anywhere'"),
    "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 2B1": (
        "row 1 of the table, that of group 1, lacks '1B1'; has '2B1, which does not run anywhere'"
    ),
    "0F0 0B0 0F1 0I1\n1F0 1B0 1F1 1B1": "row 0 of the table, that of group 0, lacks '0W1'",
    "0F0 0B0 0F1 0B1 0W1\n1F0 1B0 1F1 1B1": "row 0 of the table, that of group 0, lacks '0I1'; has '0B1'",
    "0F0 0B0 0F1 0B1": "the table has 1 rows, and the loop's ops lie on 2 device groups",
    "0F0 0B0 0F1 0B1\n1B0 1F0 1F1 1B1": "blocks wait for each other: 0B0 waits for 1B0; 1B0 waits for 1F0",
    "0F0 0W0 0I0 0F1 0B1\n1F0 1B0 1F1 1B1": "blocks wait for each other: 0W0 waits for 0I0; 1F1 waits for 0F1",
    "0F0 (0F1;0B1) 0B0\n1F0 1B0 1F1 1B1": ("blocks wait for each other: (0F1;0B1) waits for 1B1; 1F1 waits for (0F1;0B1)"),
    "0F0 0B0 0F1 0B1\n(1B0;1F0) 1F1 1B1": (
        "blocks wait for each other: 0B0 waits for (1B0;1F0); (1B0;1F0) waits for (1B0;1F0)"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_told(text: str) -> None:
    with pytest.raises(PlanError) as error:
        check_chain(Table.parse(text), chain(2, 2))
    assert str(error.value) == MISTAKES[text]


def test_what_is_computed_again_runs_behind_its_forward_and_before_its_backward() -> None:
    """Once, on its group, or not at all: then it is a part of the backward."""
    again = [own | {TableCell(s, "R", i) for i in range(2)} for s, own in enumerate(chain(2, 2))]
    check_chain(Table.parse("0F0 0F1 0R1 0R0 0B0 0B1\n1F0 1B0 1F1 1R1 1I1 1W1"), again)
    for text, wrong in {
        "0R0 0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1": "0R0 waits for 0F0; 1F0 waits for 0F0",
        "0F0 0B0 0R0 0F1 0B1\n1F0 1B0 1F1 1B1": "0B0 waits for 0R0; 1F1 waits for 0F1",
        "0F0 0R0 0B0 0F1 0R0 0B1\n1F0 1B0 1F1 1B1": "group 0, has twice '0R0'",
        "0F0 0B0 0F1 0B1\n1F0 0R0 1B0 1F1 1B1": "group 1, has '0R0 of group 0'",
    }.items():
        with pytest.raises(PlanError, match=wrong):
            check_chain(Table.parse(text), again)


# -- legal ones are run

WIDTH, LAYERS, ROWS = 6, 4, 12


def loss_of(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    loss, grads = value_and_grad(lambda p: loss_of(p, x))(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss


def arguments(layers: int = LAYERS) -> tuple[list[jax.Array], jax.Array]:
    draws = np.random.default_rng(0)
    params = [jnp.asarray(draws.normal(size=(WIDTH, WIDTH)) / 2) for _ in range(layers)]
    return params, jnp.asarray(draws.normal(size=(ROWS, WIDTH)))


@functools.cache
def one_device(layers: int) -> Any:
    return jax.device_get(jax.jit(functools.partial(step, value_and_grad=jax.value_and_grad))(*arguments(layers)))


def legal_table(seed: int) -> Table:
    """A random legal table of two groups with one or two stages each, for two or three micro-batches."""
    rng = random.Random(seed)
    while True:
        asked = random_table(rng, 2, rng.choice([2, 3]), rng.choice([2, 4]), turned=False)
        if rng.random() < 0.6:
            overlapped(rng, asked)
        asked.rows.sort(key=lambda row: min(cell for entry in row for cell in entry.cells))  # by their first stages
        if all_can_run(asked.rows):
            return asked.table


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("seed", of_the_day(range(40), 10))
def test_legal_tables_train_as_one_device_does(seed: int) -> None:
    assert_trains(legal_table(seed))


HARD = [
    "0F0 0F1 0B0 0B1\n(1F0;1B0) (1F1;1B1)",  # a forward and its own backward
    "0F0 0F1 (0I0;0W0) 0B1\n(1F0;1B0) 1F1 1B1",
    "0F0 (0F1;0B0) 0B1\n1F0 1B0 1F1 1B1",  # a block alone, and as one executable with what reads it for another micro-batch
    "0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1B1",
    "(0F0;0F1) 0B0 0B1\n1F0 1B0 1F1 1B1",  # one block twice in an executable
    "0F0 0F1 0B0 0B1\n1F0 1F1 (1B0;1B1)",
    "0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1B1",  # halves of some backwards, while others are whole
    "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1B0 1F1 1B1",
    "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1 1W1",
    "0F0 0F1 0R1 0B0 0B1\n1F0 1R0 1B0 1F1 1B1",  # computed again in a block of its own, and as a part of a backward
    "0F0 0R0 0F1 0I0 0R1 0W0 0I1 0W1\n1F0 1F1 1R1 1I1 1W1 1B0",
    "0F0 (0F1;0R0) (0R1;0B0) 0B1\n1F0 1B0 1F1 1B1",
]


@pytest.mark.parametrize("text", HARD)
def test_tables_whose_blocks_stand_in_several_ways(text: str) -> None:
    assert_trains(Table.parse(text))


@pytest.mark.parametrize("text", [text for text in HARD if ";" in text])
def test_so_they_do_where_cells_are_one_executable(text: str) -> None:
    """Stages of which each splits four products over two devices: more hides than travels, but within a micro-batch."""
    inner = plans.tensor_parallel(columns=[f"params/{i}" for i in range(0, 2 * LAYERS, 2)])
    plan = assert_trains(Table.parse(text), 2 * LAYERS, inner, 4)
    pairs = {entry for row in Table.parse(text).rows for entry in row if len({c.microbatch for c in entry.cells}) > 1}
    ran = {cell for one in plan.instructions.steps if isinstance(one, Run) and len(one.microbatches) > 1
           for cell in plan.instructions.cells(one)}  # fmt: skip
    assert {cell for pair in pairs for cell in pair.cells if cell.kind != "R"} <= {*ran, *(whole_of(cell) for cell in ran)}


BACKWARDS = {
    "0F0 0F1 0W0 0I0 0B1\n1F0 1B0 1F1 1B1": "row 0 of the table has 0W0 in front of 0I0",  # whose I is no block
    "0F0 0F1 (0W0;0I0) 0B1\n1F0 1B0 1F1 1B1": "row 0 of the table has 0W0 in front of 0I0",
    "0I0 0F0 0F1 0W0 0B1\n1F0 1B0 1F1 1B1": "row 0 of the table has 0I0 in front of 0F0",
    "0F0 0F1 0B0 0B1\n1W0 1F0 1I0 1F1 1B1": "row 1 of the table has 1W0 in front of 1I0",
    "0F0 0F1 0B0 0R0 0B1\n1F0 1B0 1F1 1B1": "row 0 of the table has 0B0 in front of 0R0",
}


@pytest.mark.parametrize("text", BACKWARDS)
def test_cells_of_a_stage_stand_in_their_order_though_they_are_no_blocks(text: str) -> None:
    with pytest.raises(OrderError, match=re.escape(f"{BACKWARDS[text]}, for which it waits")):
        plans.pipeline(2, 2, text, batch="x")


def test_chunks_are_those_of_the_table() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    with pytest.raises(PlanError, match="chunks=2 are 4 stages on 2 groups, and the table has 2; leave chunks out"):
        plans.pipeline(2, 2, text, chunks=2)
    assert plans.pipeline(2, 2, text, chunks=1) is not None


def assert_trains(table: Table, layers: int = LAYERS, inner: Any = None, devices: int = 2) -> StepPlan:
    """One device's numbers, a proof, and the table's order; each stage has weights, else its W would be nothing."""
    microbatches = 1 + max(cell.microbatch for cell in table.cells())
    stages = 1 + max(cell.stage for cell in table.cells())
    at = [f"layer_{layers * stage // stages}" for stage in range(1, stages)]
    policy = plans.pipeline(2, microbatches, table, plan=inner, at=at, batch="x")
    with jax.enable_x64(True):
        lowered = jscaler.parallelize(policy, devices=devices)(step).lower(*arguments(layers))
        jscaler.verify(lowered)
        got = jax.device_get(lowered.compile()(*arguments(layers)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), got, one_device(layers))
    assert lowered.plan.instructions.table == table
    assert out_of_order(lowered.plan) == []
    return lowered.plan
