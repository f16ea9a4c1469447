"""The program's adapters: exactly the collectives that a plan needs, no more."""

from typing import Any

import numpy as np
import pytest
from losing import losing
from lower.steps import (
    ADAMW,
    batch_and_hidden,
    collectives,
    planned,
    split,
    tensor_parallel,
    tied_loss,
)

from jscaler import plans
from jscaler.lower.program import Adapt, Compute

PARAMETERS = ("down/bias", "down/kernel", "up/bias", "up/kernel")


def gradient(of: str) -> str:
    return f"d(state/params/{of})@{of.replace('bias', 'add').replace('kernel', 'dot')}"


@pytest.mark.smoke
def test_data_parallel_reduces_every_gradient_once_and_the_loss() -> None:
    plan = planned("data_parallel", 8)
    expected = ["all_reduce loss/reduce_sum:0", *(f"all_reduce {gradient(p)}" for p in PARAMETERS)]
    assert sorted(collectives(plan)) == sorted(expected)


def test_clipping_reads_the_reduced_gradients_once() -> None:
    """The norm's reader and the update's reader share one all-reduce."""
    plan = planned("data_parallel", 4, tx=ADAMW)
    reduced = [c for c in collectives(plan) if "d(state" in c]
    assert sorted(reduced) == [f"all_reduce {gradient(p)}" for p in PARAMETERS]


def test_a_kernel_that_is_read_twice_is_reduced_once() -> None:
    """The two shares of its gradient are added where they are, and the sum is reduced."""
    plan = planned("data_parallel", 4, tied_loss)
    assert [c for c in collectives(plan) if "up/kernel" in c] == ["all_reduce d(state/params/up/kernel)"]


def test_tensor_parallel_joins_one_activation_forwards() -> None:
    """Column then row: one sum, behind the second kernel."""
    plan = planned(tensor_parallel, 4)
    made_forward = {t.name for op in plan.graph.forward() for t in op.outputs}
    assert [c for c in collectives(plan) if c.split()[1] in made_forward] == ["all_reduce down/dot:0"]


def test_tensor_parallel_gathers_no_kernel_backwards() -> None:
    """Both gradients of the second dot are cut like its forward: its kernel by rows, its input by columns.

    The batch needs no gradient, so nothing is summed for it either.
    """
    plan = planned(tensor_parallel, 4)
    of_backward = {t.name for op in plan.graph.backward() for t in (*op.inputs, *op.outputs)}
    made_forward = {t.name for op in plan.graph.forward() for t in op.outputs}
    assert [c for c in collectives(plan) if c.split()[1] in of_backward - made_forward] == []


def test_optimizer_state_lies_as_its_parameter() -> None:
    """An update follows its parameter: what is cut stays cut from step to step."""
    plan = planned(tensor_parallel, 4)
    local = {t.name: layout.local_shape for t, layout in plan.completed.inputs.items()}
    for parameter, shape in {"up/kernel": (8, 4), "up/bias": (4,), "down/kernel": (4, 8)}.items():
        assert local[f"state/params/{parameter}"] == shape
        assert local[f"state/opt/0/trace/{parameter}"] == shape


def test_two_by_four_reduces_each_tensor_over_its_own_axis() -> None:
    """Activations over the columns, gradients over the rows."""
    plan = planned(batch_and_hidden, 8)
    assert plan.program.group.axes == (("x0", 2), ("x1", 4))
    axes = {
        adapt.tensor.name: step.axes
        for adapt in plan.program.adapters
        for step in adapt.adapter.steps
        if step.kind == "all_reduce"
    }
    assert axes["down/dot:0"] == ("x1",)
    assert all(axes[gradient(p)] == ("x0",) for p in ("up/kernel", "up/bias", "down/kernel"))


@losing
def test_a_sum_that_is_wanted_cut_is_scattered() -> None:
    """A sum that its reader wants cut is scattered, which costs half of an all-reduce."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "up/dot", ("kernel", 0), devices)
        split(graph, "up/add", ("bias", 0), devices)

    assert collectives(planned(policy, 4))[0] == "reduce_scatter up/dot:0"


def test_readers_of_one_layout_share_one_adapter() -> None:
    plan = planned("data_parallel", 8, tx=ADAMW)
    wanted = [(adapt.tensor.name, adapt.adapter.target) for adapt in plan.program.adapters]
    assert len(wanted) == len(set(wanted))


def test_a_plan_on_one_device_has_no_adapters() -> None:
    assert planned("single", 1).program.adapters == ()
    assert planned("single", 8).program.adapters == ()


@pytest.mark.parametrize(
    "policy", ["data_parallel", tensor_parallel, batch_and_hidden], ids=lambda p: getattr(p, "__name__", p)
)
def test_every_slot_is_written_once_before_it_is_read(policy: Any) -> None:
    program = planned(policy, 8).program
    written = [slot for slot, _ in program.inputs]
    for task in program.tasks:
        reads = (task.input,) if isinstance(task, Adapt) else (*task.inputs, *task.after)
        assert set(reads) <= set(written)
        written += (task.output,) if isinstance(task, Adapt) else task.outputs
    assert len(written) == len(set(written))
    assert {slot for slot, _ in program.outputs} <= set(written)


def test_state_leaves_in_the_layout_it_came_in() -> None:
    plan = planned(tensor_parallel, 4)
    came = [plan.completed.inputs[t] for t in plan.graph.inputs]
    for output, source in plan.graph.next_version.items():
        assert plan.program.outputs[output][1] == came[source]


def test_op_order_is_the_order_of_the_tasks() -> None:
    """The update of one kernel before that of a bias, which the graph has first."""
    kernel, bias = "update/state/params/up/kernel/add", "update/state/params/down/bias/add"

    def policy(graph: Any, devices: np.ndarray) -> None:
        plans.data_parallel()(graph, devices)
        graph.op_order(graph[kernel], graph[bias])

    def computes(plan: Any) -> list[str]:
        return [t.op.path for t in plan.program.tasks if isinstance(t, Compute)]

    plain, ordered = computes(planned("data_parallel", 4)), computes(planned(policy, 4))
    assert plain.index(bias) < plain.index(kernel)
    assert ordered.index(kernel) < ordered.index(bias)


def test_the_program_is_a_function_of_the_plan_alone() -> None:
    def described(plan: Any) -> list[str]:
        tasks = plan.program.tasks
        both = [
            (t.op, t.inputs, t.outputs) if isinstance(t, Compute) else (t.adapter.source, t.adapter.target) for t in tasks
        ]
        return [" ".join(map(str, names)) for names in both]

    assert described(planned(batch_and_hidden, 8)) == described(planned(batch_and_hidden, 8))
