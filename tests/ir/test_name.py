"""Names keep their marks through whatever is done with them, and nobody reads a mark back from the text."""

import copy
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jscaler
from jscaler.ir import Graph
from jscaler.ir.name import Name, general, group_mark, layers_of, range_mark, turn_mark, without
from tests.plans.test_stacked_pipeline import inputs, make_state, step

TEXT = st.text("ab/@~[]:0", max_size=4)
MARKS = st.one_of(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(range_mark),
    st.integers(1, 3).map(turn_mark),
    st.lists(st.integers(0, 9), min_size=1, max_size=2).map(group_mark),
)
READS_TEXT = re.compile(
    r"\\\[\(\\d|\[@~\]|removesuffix\(\w*_mark|(path ==|get\(|path !=).*\b(RANGES|JOINED)\b|(AGAIN|\"@\w+\") in "
)
PARSERS = [  # what stood in these rooms once
    r'RANGE = re.compile(r"\[(\d+):(\d+)\]")',
    r'_GROUP = re.compile(r"[@~]\d+(-\d+)*(?=$|[@~/:)\]])")',
    "return self.path.removesuffix(turn_mark(self.turn))",
    "if maker is not None and maker.path == stack.name + JOINED and part in maker.inputs:",
    "reader = self.graph.by_path.get(stack.name + RANGES)",
    "read = (t for t in op.inputs if op.path != t.name + RANGES)",
    "trimmed = {n: _trimmed(loop, uses) if AGAIN in n else loop for n, loop in loops.items()}",
    'parts = maker.inputs if maker is not None and "@join" in maker.path else ()',
]


@given(st.lists(st.one_of(TEXT, MARKS), min_size=1, max_size=6))
def test_a_sum_of_texts_and_marks_is_their_text(parts: list[str]) -> None:
    name = parts[0]
    for part in parts[1:]:
        name = name + part
    assert name == "".join(map(str, parts))
    assert general(name) == "".join(part for part in parts if not isinstance(part, Name))
    bounds = [mark.value for part in parts if isinstance(part, Name) for mark in part.parts if mark.kind == "layers"]  # type: ignore[union-attr]
    assert layers_of(name) == (bounds[0] if bounds else None)


def test_a_text_in_front_keeps_marks() -> None:
    name = "d(" + ("layers/dot" + range_mark((4, 8))) + ")@" + ("x" + turn_mark(1))
    assert name == "d(layers/dot[4:8])@x~1"
    assert without(name, "turn") == "d(layers/dot[4:8])@x"
    assert layers_of(name) == (4, 8)
    assert turn_mark(0) == ""


def test_a_text_that_looks_like_a_mark_is_none() -> None:
    """A user's dict has keys like these."""
    assert layers_of("state/x[4:8]") is None
    assert general("state/x[4:8]@0-1~1") == "state/x[4:8]@0-1~1"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda name: pickle.loads(pickle.dumps(name))])
def test_a_copy_has_the_same_marks(copied: object) -> None:
    name = "a" + range_mark((0, 2)) + group_mark([0, 1])
    assert callable(copied)
    assert copied(name).parts == name.parts
    assert copied(name) == "a[0:2]@0-1"


def _names(graph: Graph) -> set[str]:
    names = {name for op in graph.ops for name in (op.path, *(t.name for t in (*op.inputs, *op.outputs)))}
    for loop in graph.loops.values():
        names |= {loop.name, *(t.name for t in (*loop.operands, *loop.results, *loop.inner, *loop.returned))}
    return names | {region.name for op in graph.ops for region in op.remat}


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        ("pipeline(2, 2, '1f1b+R', batch='x', plan=recompute_layers())", 2),
        ("pipeline(2, 2, plan=zero3('x'), batch='x')", 4),
    ],
)
def test_every_name_of_a_pipeline_has_the_marks_that_a_person_sees(plan: str, devices: int) -> None:
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(make_state(4), inputs())
    marked = 0
    for name in _names(lowered.plan.graph):
        seen = re.search(r"\[(\d+):(\d+)\]", name)
        assert layers_of(name) == (None if seen is None else (int(seen[1]), int(seen[2]))), name
        marked += seen is not None
    assert marked > 50


@pytest.mark.parametrize("line", PARSERS)
def test_what_reads_a_name_is_known_when_it_is_seen(line: str) -> None:
    assert READS_TEXT.search(line)


def test_no_name_is_read_for_a_range_a_turn_or_a_piece() -> None:
    package = Path(jscaler.__file__).parent
    rooms = [
        package / room
        for room in ("ir", "capture", "rules", "primitives", "plans", "schedule", "materialize", "lower", "estimate")
    ]
    for file in (file for room in rooms for file in room.glob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not READS_TEXT.search(line), f"{file.name}:{number}: {line.strip()}"
