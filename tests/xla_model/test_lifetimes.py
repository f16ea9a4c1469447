"""Lifetimes: random programs against an oracle that looks at every value at every kernel, and loops by hand."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jscaler.xla_model.block import Block, BlockStep, Inner, Value
from jscaler.xla_model.lifetimes import WORKSPACE, lifetimes

SIZES = (10, 20, 40)


@st.composite
def programs(draw: st.DrawFn) -> Block:
    """Calls that read up to three values each; some results may be written over an operand."""
    values = [Value(draw(st.sampled_from(SIZES)), f"in{i}") for i in range(2)]
    given, steps = tuple(values), []
    for number in range(draw(st.integers(1, 12))):
        reads = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))
        made = Value(draw(st.sampled_from(SIZES)), f"v{number}")
        over = ((0, draw(st.integers(0, len(reads) - 1))),) if draw(st.booleans()) else ()
        steps.append(BlockStep("call", "call", reads, (made,), over=over))
        values.append(made)
    outputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3, unique=True)))
    return Block(given, tuple(steps), outputs)


def oracle(block: Block) -> list[int]:
    """Bytes that live at each step: every value from the step that makes it to the last that reads it."""

    def last(value: Value) -> int:
        readers = [i for i, step in enumerate(block.steps) if value in step.reads]
        return len(block.steps) if value in block.outputs else max(readers, default=-1)

    found = []
    for here, step in enumerate(block.steps):
        made = {v: i for i, s in enumerate(block.steps) for v in s.writes}
        live = [v for v, at in made.items() if at == here or at < here <= last(v)]
        total = sum(v.nbytes for v in live)
        for result, operand in step.over:
            old, new = step.reads[operand], step.writes[result]
            total -= new.nbytes if old in made and last(old) == here and old.nbytes == new.nbytes else 0
        found.append(total)
    return found


@given(programs())
def test_random_programs_hold_what_the_oracle_holds(block: Block) -> None:
    expected = oracle(block)
    found = lifetimes(block)
    assert [m.nbytes for m in found.timeline] == expected
    assert found.peak == max(expected)
    assert found.timeline[found.moment].nbytes == found.peak
    assert sum(v.nbytes for v in found.live) == found.peak
    held = [sum(s.nbytes for s in found.spans if s.first <= moment <= s.last) for moment in range(len(expected))]
    assert held == expected


def names(values: Sequence[Value]) -> list[str]:
    return [str(v) for v in values]


def test_an_output_takes_a_donated_argument_once_nobody_reads_it() -> None:
    old, grad, new, loss = (Value(100, n) for n in ("old", "grad", "new", "loss"))
    update = BlockStep("call", "update", (old, grad), (new,))
    block = Block((old,), (BlockStep("call", "grad", (old,), (grad,)), update), (new,))
    assert lifetimes(block).peak == 200
    assert lifetimes(block, {new: old}).peak == 100
    late = Block((old,), (*block.steps, BlockStep("call", "loss", (old,), (loss,))), (new, loss))
    assert lifetimes(late, {new: old}).peak == 200  # written elsewhere first: new, and grad or loss


def test_an_elementwise_result_takes_the_buffer_that_dies_there() -> None:
    x, a, b, c = (Value(100, n) for n in "xabc")
    steps = (
        BlockStep("call", "dot", (x,), (a,)),
        BlockStep("fused", "exp", (a,), (b,)),
        BlockStep("call", "dot", (b,), (c,)),
    )
    assert [m.nbytes for m in lifetimes(Block((x,), steps, (c,))).timeline] == [100, 100, 200]


def loop(length: int = 5) -> tuple[Block, Inner]:
    """Each iteration reads a slice, and the carry goes through a dot with it; the carry before is stacked."""
    start, weights, inside, out, final = (
        Value(n, t) for n, t in ((8, "start"), (100 * 5, "ws"), (8, "x"), (8, "y"), (8, "end"))
    )
    piece, stack, hidden = Value(100, "w"), Value(8 * length, "stack"), Value(30, "h")
    steps = (
        BlockStep("fused", "dynamic_slice", (weights,), (piece,)),
        BlockStep("reduced", "dynamic_update_slice", (inside,), (Value(0),)),
        BlockStep("call", "dot", (inside, piece), (hidden,)),
        BlockStep("call", "dot", (hidden,), (out,)),
    )
    inner = Inner(Block((inside, weights), steps, (out,)), ((start, inside, out, final),), length)
    step = BlockStep("loop", "scan", (start, weights), (final, stack), over=((0, 0),), inner=(inner,))
    return Block((start, weights), (step,), (final, stack)), inner


def test_a_loop_holds_its_carry_and_stacks_and_one_iteration() -> None:
    block, _ = loop()
    found = lifetimes(block)
    # the carry's buffer and the stack; in an iteration the slice and what is made of it
    assert found.peak == 8 + 40 + 100 + 30
    assert [(m.name, m.nbytes) for m in found.timeline] == [
        ("dynamic_update_slice", 48),
        ("dynamic_slice", 148),
        ("dot", 178),
        ("dot", 78),
    ]
    assert set(names(found.live)) == {"w", "h", "stack", "end"}
    assert {(str(s.value), s.first, s.last) for s in found.spans} >= {("stack", 0, 3), ("w", 1, 2), ("h", 2, 3)}


def test_a_carry_that_is_read_later_cannot_be_written_over() -> None:
    block, inner = loop()
    extra = BlockStep("call", "dot", (inner.carries[0][1],), (Value(1, "late"),))
    longer = Inner(Block(inner.block.inputs, (*inner.block.steps, extra), inner.block.outputs), inner.carries)
    step = BlockStep("loop", "scan", block.steps[0].reads, block.steps[0].writes, inner=(longer,))
    timeline = lifetimes(Block(block.inputs, (step,), block.outputs)).timeline
    assert timeline[-1].nbytes == 48 + 8 + 1


def test_a_product_has_a_workspace() -> None:
    x, y = Value(100, "x"), Value(100, "y")
    assert lifetimes(Block((x,), (BlockStep("call", "dot_general", (x,), (y,)),), (y,))).peak == 100 + WORKSPACE


def test_a_slice_that_is_only_handed_on_is_held_once() -> None:
    """A carry that becomes a slice: no kernel of the iteration reads it."""
    stack, piece = Value(4000, "stack"), Value(400, "piece")
    block = Block((stack,), (BlockStep("fused", "dynamic_slice", (stack,), (piece,)),), (piece,))
    assert lifetimes(block).peak == 400
