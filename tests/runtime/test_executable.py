"""A step as it runs: numbers, donated buffers, slots that are let go, state in parts, and arguments that do not fit."""

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_numbers import assert_trees_close

import jscaler
from jscaler import CaptureError, plans
from jscaler.lower.instructions import Gather, Run, Send
from jscaler.runtime.compiled import Compiled
from jscaler.runtime.executable import MOST_STARTED, Between, Executable, executable, lowered, traced

TX = optax.sgd(0.1, momentum=0.9)
LAYERS, WIDTH, ROWS = 4, 4, 16


def train_step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Layers in a stack, and what each row has for itself."""
    params, moments = state

    def loss_of(params: Any) -> Any:
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])[0]
        rows = h @ params["last"]
        return jnp.mean((rows - batch["y"]) ** 2), rows

    (loss, rows), grads = value_and_grad(loss_of, has_aux=True)(params)
    updates, moments = TX.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss, rows


plain = jax.jit(functools.partial(train_step, value_and_grad=jax.value_and_grad))


def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)), "last": jax.random.normal(keys[1], (WIDTH, 3))}
    batch = {"x": jax.random.normal(keys[2], (ROWS, WIDTH)), "y": jax.random.normal(keys[3], (ROWS, 3))}
    return (params, TX.init(params)), batch


def compiled_by(policy: Any, devices: int) -> Compiled:
    step = jscaler.parallelize(policy, devices=devices, donate_argnames="state")
    return step(lambda state, batch: train_step(state, batch)).lower(*arguments()).compile()


@pytest.fixture(scope="module")
def staged() -> Compiled:
    """Two stages on two devices each, whose layers are parts of one stack."""
    return compiled_by(plans.pipeline(2, 4, plan=plans.data_parallel("batch/*"), batch="batch/*"), 4)


@pytest.fixture(scope="module")
def whole() -> Compiled:
    """One program on two devices."""
    return compiled_by(plans.data_parallel("batch/*"), 2)


@pytest.fixture(params=["staged", "whole"])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return request.getfixturevalue(request.param)


# -- numbers, and what becomes of the arguments


def test_steps_are_those_of_jit(compiled: Compiled) -> None:
    """The state of one step is the next one's; the batch is given each time."""
    ours, theirs = arguments()[0], arguments()[0]
    for _ in range(3):
        (ours, *mine), (theirs, *true) = compiled(ours, arguments()[1]), plain(theirs, arguments()[1])
        assert_trees_close(mine, true)
    assert_trees_close(ours, theirs)


def test_donated_leaves_are_gone_and_others_stay(compiled: Compiled) -> None:
    program = compiled.lowered.executable
    placed = compiled.place(jax.tree.leaves(arguments()))
    jax.block_until_ready(program.run(compiled.calls, placed))
    gone = [number for number, leaf in enumerate(placed) if leaf.is_deleted()]
    assert gone == sorted(program.donated) == list(range(len(jax.tree.leaves(arguments()[0]))))


def test_without_reuse_every_leaf_stays(compiled: Compiled) -> None:
    """Also the buffers of sums, so that all that a block leaves can be looked at."""
    plan, devices = compiled.plan, compiled.lowered.devices
    program = executable(plan, devices, compiled.lowered.executable.donated, reuse=False)
    calls = program.calls([block_program.compile() for block_program in lowered(plan, program)])
    placed = compiled.place(jax.tree.leaves(arguments()))
    seen: list[Any] = []
    results = program.run(calls, placed, lambda _, values: seen.extend(values))
    assert_trees_close([*results], jax.tree.leaves(plain(*arguments())))
    assert not any(value.is_deleted() for value in seen)
    stacked = {end.number for end in program.ins.stacked}  # taken apart into memory of their own, and given away as said
    assert [n for n, leaf in enumerate(placed) if leaf.is_deleted()] == sorted(stacked & {*program.donated})


def test_results_take_the_memory_of_donated_leaves(whole: Compiled) -> None:
    """A parameter's next version lies where it lay."""
    placed = whole.place(jax.tree.leaves(arguments()))
    held = [shard.data.unsafe_buffer_pointer() for leaf in placed[:2] for shard in leaf.addressable_shards]
    results = whole.flat(*placed)
    now = [shard.data.unsafe_buffer_pointer() for leaf in results[:2] for shard in leaf.addressable_shards]
    assert now == held


# -- state in parts


def test_a_stack_in_parts_is_one_array_outside(staged: Compiled) -> None:
    """Each stage has its own layers; results are whole, lie as the arguments do, and are the next step's arguments."""
    program = staged.lowered.executable
    names = {staged.graph.inputs[end.start].name.split("[")[0] for end in program.ins.stacked}
    assert names == {"state/0/layers", "state/1/0/trace/layers"}
    (params, moments), *_ = staged(*arguments())
    for leaf in (params["layers"], moments[0].trace["layers"]):
        assert leaf.shape == (LAYERS, WIDTH, WIDTH)
        assert leaf.is_fully_addressable
        held = {shard.device.id: shard.data.shape[0] for shard in leaf.addressable_shards}
        assert held == dict.fromkeys(range(4), LAYERS // 2)
        starts = {shard.device.id: shard.index[0].start or 0 for shard in leaf.addressable_shards}
        assert starts == {0: 0, 1: 0, 2: LAYERS // 2, 3: LAYERS // 2}
    (again, _), *_ = staged((params, moments), arguments()[1])
    assert params["layers"].is_deleted(), "its parts have been given away"
    assert again["layers"].sharding == params["layers"].sharding


# -- the order of instructions, and slots


def test_each_instruction_is_told_of_when_it_was_started(compiled: Compiled) -> None:
    program, told = compiled.lowered.executable, list[tuple[int, int]]()
    placed = compiled.place(jax.tree.leaves(arguments()))
    program.run(compiled.calls, placed, lambda place, values: told.append((place, len(values))))
    steps = compiled.plan.instructions.steps
    assert [place for place, _ in told] == list(range(len(steps)))
    blocks = program.blocks
    assert [n for _, n in told] == [len(blocks[s.block].computed) if isinstance(s, Run) else 1 for s in steps]


class Token:
    """A value that is no array; where it lives can be told."""

    def __init__(self, started: bool = False):
        self.started = started

    def delete(self) -> None:
        """As arrays have it."""


def pretended(program: Executable, started: Callable[[int], Sequence[Any]]) -> tuple[Executable, list[Any]]:
    """An executable whose hops and stacks hand tokens on, and what runs its blocks: ``started`` is told of each."""
    steps = program.instructions.steps
    hops = tuple((lambda _: Token()) for _ in program.between.hops)
    gathers = {step.value: (lambda *_: Token()) for step in steps if isinstance(step, Gather)}
    between = Between(hops, gathers, dict.fromkeys(program.instructions.counts, Token()))
    shown = dataclasses.replace(
        program,
        make_between=lambda: between,
        ins=dataclasses.replace(program.ins, stacked=()),
        outs=dataclasses.replace(program.outs, stacked=()),
    )
    return shown, [lambda *_, number=number: started(number) for number in range(len(program.blocks))]


def test_a_value_is_let_go_behind_its_last_reader(staged: Compiled) -> None:
    """Only those values of blocks are alive that a later instruction reads, or that the last one has left."""
    program = staged.lowered.executable
    steps = staged.plan.instructions.steps
    alive: list[tuple[int, int, weakref.ref[Token]]] = []  # the instruction, which of its values, and it
    last: dict[tuple[int, int], int] = {}
    writer: dict[int, tuple[int, int]] = {}
    for place, step in enumerate(steps):
        reads = step.reads if isinstance(step, Run) else (step.source,) if isinstance(step, Send) else step.pieces
        last.update({writer[slot]: place for slot in reads if slot in writer})
        writes = [step.writes[n] for n in program.blocks[step.block].computed] if isinstance(step, Run) else [step.target]
        writer.update({slot: (place, n) for n, slot in enumerate(writes)})
    results = {writer[slot] for slot in range(program.outs.total) if slot in writer}
    most = 0

    def check(place: int, values: Sequence[Any]) -> None:
        nonlocal most
        alive.extend((place, n, weakref.ref(value)) for n, value in enumerate(values))
        held = {(at, n) for at, n, ref in alive if ref() is not None and at < place - 1}
        wanted = {key for key in ((at, n) for at, n, _ in alive) if key in results or last.get(key, -1) >= place}
        assert held <= wanted, f"{held - wanted} live on behind instruction {place}"
        most = max(most, len(held))

    pretend, calls = pretended(program, lambda number: [Token() for _ in program.blocks[number].computed])
    alone = tuple(dataclasses.replace(block, watched=None) for block in pretend.blocks)  # what is watched is held longer
    pretend = dataclasses.replace(pretend, blocks=alone)
    pretend.run(calls, [Token() for _ in range(program.ins.total)], check)
    assert 0 < most < len(alive) / 2


def test_few_programs_of_several_devices_are_under_way(staged: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's CPU backend aborts where too many are; each is waited for in the order in which it was started."""
    program = staged.lowered.executable
    running: list[Token] = []
    counts = []

    def start(number: int) -> list[Token]:
        values = [Token() for _ in program.blocks[number].computed]
        watched = program.blocks[number].watched
        if watched is not None:
            running.append(values[watched])
        counts.append(len(running))
        return values

    def wait(value: Token) -> None:
        assert value is running.pop(0)

    pretend, calls = pretended(program, start)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    pretend.run(calls, [Token() for _ in range(program.ins.total)])
    assert max(counts) == MOST_STARTED + 1
    assert len(counts) > 2 * MOST_STARTED


def test_no_program_of_one_device_is_waited_for() -> None:
    compiled = compiled_by(plans.pipeline(2, 2, batch="batch/*"), 2)
    assert all(block.watched is None for block in compiled.lowered.executable.blocks)


# -- programs


def test_blocks_of_one_program_are_lowered_once(staged: Compiled) -> None:
    """On devices that are only described, the layers of both stages are one jitted function, traced and lowered once."""
    plan = staged.plan
    program = executable(plan, (), ())
    kinds = Counter(id(block.jitted) for block in program.blocks)
    assert max(kinds.values()) >= 2
    for stages in (traced(plan, program), lowered(plan, program)):
        by_jitted = {(id(block.jitted), id(stage)) for block, stage in zip(program.blocks, stages, strict=True)}
        assert len(by_jitted) == len(kinds)
    for block, here in zip(program.blocks, staged.lowered.executable.blocks, strict=True):
        assert (block.takes, block.computed, block.named) == (here.takes, here.computed, here.named)
        assert program.blocks[block.named].jitted is block.jitted


def test_numbers_of_less_than_a_byte_go_through_the_jitted_function() -> None:
    """JAX's compiled functions refuse their layout."""

    def step(batch: jax.Array, weight: jax.Array) -> jax.Array:
        return batch.astype(jnp.float32) * weight

    batch = jnp.arange(8, dtype=jnp.int4).reshape(4, 2)
    compiled = jscaler.parallelize("data_parallel(batch='batch')", devices=2)(step).lower(batch, jnp.ones(2)).compile()
    (block,) = compiled.lowered.executable.blocks
    assert block.few_bits
    assert compiled.calls == (block.jitted,)
    assert_trees_close(compiled(batch, jnp.arange(2.0)), step(batch, jnp.arange(2.0)))


def test_what_a_step_is_said_to_take_and_compute(compiled: Compiled) -> None:
    program = compiled.lowered.executable
    told = str(program.overview())
    leaves = len(jax.tree.leaves(arguments()))
    assert f"{leaves} leaves in, {len(program.donated)} donated; {leaves} leaves out, 0 as they came" in told
    assert f"Executable of {len(program.blocks)} block" in told
    assert all(f"block {number}: takes " in told for number in range(min(len(program.blocks), 16)))
    assert ("and " + str(len(program.blocks) - 16) + " more" in told) == (len(program.blocks) > 16)


# -- arguments that do not fit


def with_batch(**changes: Any) -> tuple[Any, Any]:
    state, batch = arguments()
    return state, {**batch, **changes}


WRONG: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "another shape": (
        lambda: with_batch(x=jnp.ones((8, WIDTH))),
        r"'batch/x' is float32\[8, 4\] instead of float32\[16, 4\]",
    ),
    "another dtype": (
        lambda: with_batch(x=jnp.ones((ROWS, WIDTH), jnp.bfloat16)),
        r"'batch/x' is bfloat16\[16, 4\] instead of float32\[16, 4\]",
    ),
    "one dim less": (lambda: with_batch(y=jnp.ones(ROWS)), r"'batch/y' is float32\[16\] instead of float32\[16, 3\]"),
    "a leaf more": (lambda: with_batch(z=jnp.ones(2)), "the argument trees differ: with 'batch/z'"),
    "a leaf less": (lambda: (arguments()[0], {"x": jnp.ones((ROWS, WIDTH))}), "the argument trees differ: without 'batch/"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_of_another_form_are_named(compiled: Compiled, wrong: str) -> None:
    """And nothing is donated then: the state can be used again."""
    make, match = WRONG[wrong]
    given = make()
    with pytest.raises(CaptureError, match=rf"(?s)was lowered for arguments of another tree, shape, dtype.*{match}"):
        compiled(*given)
    with pytest.raises(CaptureError, match=rf"(?s)lowered for other arguments.*{match}"):
        compiled.trace(*given)
    with pytest.raises(CaptureError, match=rf"(?s)lowered for other arguments.*{match}"):
        compiled.measure(*given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_arguments_are_moved_to_where_they_should_lie(compiled: Compiled) -> None:
    """From the host, and from another device."""
    expected = plain(*arguments())
    assert_trees_close(compiled(*jax.tree.map(np.asarray, arguments())), expected)
    assert_trees_close(compiled(*jax.device_put(arguments(), jax.devices()[7])), expected)
