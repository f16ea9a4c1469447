"""Dynamic axial parallelism: few switches between rows and columns, and one device's numbers."""

from collections import Counter

import pytest
from axial_steps import axial_images, evoformer
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, mlp, planned

from jscaler.errors import PlanError, SplitError, UnknownNameError
from jscaler.lower.program import Adapt
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import dap, recompute_layers

pytestmark = pytest.mark.filterwarnings("ignore::jscaler.errors.PlanWarning")  # the distance of residues needs both


def forward(plan: StepPlan, module: str) -> Counter[str]:
    """The kinds of collectives that bring on what forward ops of ``module`` make."""
    made = {t for op in plan.graph.ops if op.kind == "forward" and module in op.path for t in op.outputs}
    steps = [(a.tensor, s.kind) for a in plan.program.adapters if isinstance(a, Adapt) for s in a.adapter.steps]
    return Counter(kind for tensor, kind in steps if tensor in made and kind not in ("slice", "value_mask"))


BLOCK = {
    "all_to_all": 4,  # m behind row attention, and at the end; z behind the first triangles, and between attentions
    "all_gather": 4,  # three biases of attention, and one operand of the outer product
    "reduce_scatter": 2,  # both products of triangles
}


@pytest.mark.one_day_in(2)
def test_a_block_of_an_evoformer_switches_four_times() -> None:
    plan = planned(dap(), evoformer(layers=2), 4)
    assert forward(plan, "block_0/") == BLOCK


@pytest.mark.one_day_in(2)
def test_a_stack_of_them_switches_as_often() -> None:
    plan = planned(dap(), evoformer(layers=2, stacked=True), 4)
    found = forward(plan, "blocks/")
    carried = Counter(
        s.kind for a in plan.program.adapters if a.tensor.name == "stack/scan:carry0" for s in a.adapter.steps
    )
    assert found + carried == BLOCK


@pytest.mark.one_day_in(2)
def test_attention_runs_along_whole_rows() -> None:
    plan = planned(dap(), evoformer(), 4)
    split = {op: set(factors) for op, factors in plan.plan.split_factors.items() if op.endswith("attn/dot")}
    assert split == {
        f"stack/block_0/{name}/attn/dot": {"b"} for name in ("row_attention", "column_attention", "starting", "ending")
    }


def test_of_images_by_any_name() -> None:
    plan = planned(dap(), axial_images(), 4)
    assert forward(plan, "") == {"all_to_all": 3, "all_reduce": 2}  # between four attentions; two means, at the end


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(
    ("policy", "devices", "changes"),
    of_the_day(
        [
            (dap(), 4, {}),
            (dap(dp=2), 8, {"stacked": True, "layers": 2, "remat": True}),
            (recompute_layers(dap(), on="stack/block_*"), 2, {}),
        ],
        3,
    ),
)
def test_the_numbers_of_an_evoformer_are_those_of_one_device(
    policy: object, devices: int, changes: dict[str, object]
) -> None:
    assert_same_numbers(policy, lambda: evoformer(**changes), devices)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("policy", "devices"), [(dap(), 2), (dap(), 8), (dap(dap=2), 4)])
def test_the_numbers_of_images_are_those_of_one_device(policy: object, devices: int) -> None:
    assert_same_numbers(policy, axial_images, devices)


def test_axes_can_be_said() -> None:
    images = axial_images()
    found, said = (planned(policy, images, 4) for policy in (dap(), dap(axes={"batch/x": (2, 3)})))
    assert found.plan.decisions == said.plan.decisions


def test_mistakes() -> None:
    with pytest.raises(PlanError, match=r"no dims of the data are axes, .* pass dap\(axes=\.\.\.\)"):
        planned(dap(), mlp(), 4)
    with pytest.raises(UnknownNameError, match=r"pass dap\(axes=\.\.\.\)"):
        planned(dap(axes={"batch/pixels": (2, 3)}), axial_images(), 4)
    with pytest.raises(PlanError, match="dap: dp=3 is a grid of 3 devices, and 4 are given"):
        planned(dap(dp=3), axial_images(), 4)
    with pytest.raises(SplitError, match="cannot split factor 'dim 0' of size 2 into 4"):
        planned(dap(dp=4), axial_images(), 4)
