"""Planted faults in the instructions of a pipeline: each is noticed, and named."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from layer_chain import step

import jscaler
from jscaler import VerificationError, plans
from jscaler.lower.donation import donated_imports
from jscaler.lower.instructions import Instruction, Run, Send
from jscaler.lower.step_plan import StepPlan
from jscaler.verification.slots import check_instructions


@pytest.fixture(scope="module")
def lowered() -> Any:
    params = [jax.ShapeDtypeStruct((4, 4), "float32") for _ in range(4)]
    policy = plans.pipeline(4, 3, "gpipe", batch="x")
    return jscaler.parallelize(policy, devices=4)(step).lower(params, jax.ShapeDtypeStruct((6, 4), "float32"))


def places(plan: StepPlan, kind: type, name: str = "", microbatch: int | None = None) -> list[int]:
    """Where instructions of a kind stand, of a block or of a micro-batch."""
    found = []
    for i, one in enumerate(plan.instructions.steps):
        if isinstance(one, kind) and (microbatch is None or getattr(one, "microbatch", None) == microbatch):
            found += [i] if not name or (isinstance(one, Run) and plan.block_name(one.block) == name) else []
    return found


Steps = list[Instruction]


def swap(steps: Steps, i: int, j: int, field: str) -> None:
    first, second = getattr(steps[i], field), getattr(steps[j], field)
    steps[i] = dataclasses.replace(steps[i], **{field: second})  # type: ignore[arg-type]
    steps[j] = dataclasses.replace(steps[j], **{field: first})  # type: ignore[arg-type]


def run_at(steps: Steps, place: int) -> Run:
    one = steps[place]
    assert isinstance(one, Run)
    return one


def wrong_microbatch(plan: StepPlan, steps: Steps) -> None:
    """The second micro-batch's send takes what the first has sent."""
    sends = {i: one for i, one in enumerate(steps) if isinstance(one, Send)}
    first, one = next(iter(sends.items()))
    second = next(i for i, s in sends.items() if s.transfer == one.transfer and s.microbatch == 1)
    steps[first] = dataclasses.replace(one, freed=())
    steps[second] = dataclasses.replace(sends[second], source=one.source)


def swapped_stages(plan: StepPlan, steps: Steps) -> None:
    swap(steps, places(plan, Run, "1F", 0)[0], places(plan, Run, "2F", 0)[0], "block")


def freed_early(plan: StepPlan, steps: Steps) -> None:
    one = run_at(steps, places(plan, Run, "1B", 2)[0])
    slot = next(s for s in one.reads if s in one.freed)
    written = [(i, s.writes if isinstance(s, Run) else getattr(s, "target", -1)) for i, s in enumerate(steps)]
    writer = next(i for i, slots in written if slots == slot or (isinstance(slots, tuple) and slot in slots))
    steps[writer] = dataclasses.replace(steps[writer], freed=(*steps[writer].freed, slot))


def sent_when_donated(plan: StepPlan, steps: Steps) -> None:
    first = places(plan, Run, "3B", 0)[0]
    one = run_at(steps, first)
    (place, *_) = donated_imports(plan, plan.blocks[one.block])
    later = next(i for i in places(plan, Send) if i > first)
    steps[later] = dataclasses.replace(steps[later], source=one.reads[place])  # type: ignore[arg-type]


def counted_twice(plan: StepPlan, steps: Steps) -> None:
    steps.insert(places(plan, Run, "0B", 1)[0], steps[places(plan, Run, "0B", 1)[0]])


def left_out(plan: StepPlan, steps: Steps) -> None:
    """A sum goes on from its start, without what was added before."""
    first, second = (run_at(steps, places(plan, Run, "0B", i)[0]) for i in (0, 1))
    (place, *_) = donated_imports(plan, plan.blocks[first.block])
    reads = tuple(first.reads[i] if i == place else slot for i, slot in enumerate(second.reads))
    steps[places(plan, Run, "0B", 0)[0]] = dataclasses.replace(first, reads=(*first.reads[:place], second.reads[place]))
    steps[places(plan, Run, "0B", 1)[0]] = dataclasses.replace(second, reads=reads)


def waits_for_itself(plan: StepPlan, steps: Steps) -> None:
    steps.insert(0, steps.pop(places(plan, Run, "1F", 0)[0]))


def never_run(plan: StepPlan, steps: Steps) -> None:
    del steps[places(plan, Run, "0B", 2)[0]]


FAULTS = {
    wrong_microbatch: "of micro-batch 1 reads slot .*, which holds value .* of iteration 0",
    swapped_stages: "of micro-batch 0 reads slot",
    freed_early: "of micro-batch 2 reads slot .*, which was freed behind",
    sent_when_donated: "the send of .* reads slot .*, which was donated to 3B of micro-batch 0",
    counted_twice: "0B of micro-batch 1 runs a second time",
    left_out: "0B of micro-batch 0 reads slot .*, into which nothing has been written",
    waits_for_itself: "1F of micro-batch 0 reads slot .*, into which nothing has been written",
    never_run: "0B does not run for|reads slot",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_named(lowered: Any, fault: Callable[..., None]) -> None:
    plan = lowered.plan
    assert check_instructions(plan) > 50
    steps = list(plan.instructions.steps)
    fault(plan, steps)
    wrong = dataclasses.replace(plan, instructions=dataclasses.replace(plan.instructions, steps=tuple(steps)))
    with pytest.raises(VerificationError, match=FAULTS[fault]):
        jscaler.verify(wrong)
