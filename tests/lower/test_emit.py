"""What is emitted: XLA's program holds exactly the collectives that ours names."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from losing import losing
from lower.steps import ADAMW, batch_and_hidden, make_batch, make_state, make_step, split, tensor_parallel

import jscaler
from jscaler.lower.emit import physical_mesh, sharding
from jscaler.lower.scopes import adapter_scope, op_scope
from jscaler.materialize import Layout

KINDS = {  # ours: StableHLO's, HLO's
    "all_reduce": ("all_reduce", "all-reduce"),
    "all_gather": ("all_gather", "all-gather"),
    "reduce_scatter": ("reduce_scatter", "reduce-scatter"),
    "all_to_all": ("all_to_all", "all-to-all"),
}


def crosswise(graph: Any, devices: np.ndarray) -> None:
    """Rows of the batch to columns of the hidden layer: an exchange."""
    split(graph, "up/dot", ("batch/x", 0), devices)
    split(graph, "up/add", ("bias", 0), devices)


def lowered(policy: Any, devices: int = 8) -> jscaler.Lowered:
    step = jscaler.parallelize(policy, devices=devices, donate_argnames="state")(make_step(tx=ADAMW))
    return step.lower(make_state(ADAMW), make_batch())


def named(plan: Any) -> Counter[str]:
    """The collectives of the program, by kind."""
    steps = [step for adapt in plan.program.adapters for step in adapt.adapter.steps]
    return Counter(step.kind for step in steps if step.kind in KINDS)


def in_hlo(text: str) -> Counter[str]:
    """Collectives in optimized HLO by kind. XLA joins several into one of many operands: operands are counted."""
    found: Counter[str] = Counter()
    for ours, (_, theirs) in KINDS.items():
        for operands in re.findall(rf"= .*? {theirs}(?:-start)?\(([^)]*)\)", text):
            found[ours] += 1 if ours == "all_to_all" else len(operands.split(","))
    return +found


@losing
@pytest.mark.smoke
@pytest.mark.parametrize(
    "policy", ["data_parallel", tensor_parallel, batch_and_hidden, crosswise], ids=lambda p: getattr(p, "__name__", p)
)
def test_the_executable_holds_the_collectives_that_the_program_names(policy: Any) -> None:
    step = lowered(policy)
    expected = named(step.plan)
    assert expected
    text = step.as_text()
    assert Counter({k: len(re.findall(rf'"?stablehlo\.{v[0]}"?\(', text)) for k, v in KINDS.items()}) == expected
    assert "collective_permute" not in text
    compiled = step.compile().as_text()
    assert in_hlo(compiled) == expected
    assert "collective-permute" not in compiled


def test_a_plan_that_only_copies_has_no_collectives() -> None:
    step = lowered("single")
    assert named(step.plan) == Counter()
    assert in_hlo(step.compile().as_text()) == Counter()


def test_one_device_needs_no_mesh() -> None:
    step = lowered("single", devices=1)
    assert step.plan.program.group.axes == ()
    assert "shard_map" not in step.as_text()


def test_the_regular_expression_can_count() -> None:
    text = """
      %r = (f32[4]{0}, f32[8,16]{1,0}) all-reduce(%a, %b), channel_id=1, to_apply=%add
      %g = f32[8]{0} all-gather(%c), dimensions={0}
      %t = f32[8]{0} all-to-all(%c), dimensions={0}
    """
    assert in_hlo(text) == {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}


def _index(made: Any, name: str) -> int:
    return [t.name for t in made.graph.inputs].index(name)


def test_state_is_an_ordinary_array_in_the_plans_layout() -> None:
    """One part of the hidden layer on each device, in the order of the policy's devices."""

    def reversed_devices(graph: Any, devices: np.ndarray) -> None:
        tensor_parallel(graph, devices[::-1])

    compiled = lowered(reversed_devices, devices=4).compile()
    state = make_state(ADAMW)
    kernel = np.asarray(state["params"]["up"]["kernel"])
    placed = jax.device_put(kernel, compiled.lowered.executable.in_shardings[_index(compiled, "state/params/up/kernel")])
    for shard in placed.addressable_shards:
        part = 3 - jax.devices().index(shard.device)
        np.testing.assert_array_equal(shard.data, kernel[:, 4 * part : 4 * part + 4])


def test_results_have_the_shardings_they_are_said_to_have() -> None:
    step = lowered(tensor_parallel, devices=4)
    state, loss = step.compile()(make_state(ADAMW), make_batch())
    for leaf, said in zip([*jax.tree.leaves(state), loss], step.executable.outs.shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(said, leaf.ndim)


def test_a_chosen_list_of_devices_is_used_in_its_order() -> None:
    devices = [jax.devices()[i] for i in (5, 2, 7, 0)]
    step = jscaler.parallelize("data_parallel", devices=devices)(make_step(tx=ADAMW))
    made = step.lower(make_state(ADAMW), make_batch())
    assert list(physical_mesh(made.plan.program.group, devices).devices.flat) == devices
    placed = jax.device_put(make_batch()["x"], made.executable.in_shardings[_index(made, "batch/x")])
    assert [shard.device for shard in sorted(placed.addressable_shards, key=lambda s: s.index[0].start)] == devices


def test_a_layout_without_a_partition_spec_is_never_a_sharding() -> None:
    program = lowered("data_parallel", devices=4).plan.program
    shares = Layout(program.group, (), (), (("x0", "add"),))
    with pytest.raises(AssertionError, match="has no PartitionSpec"):
        sharding(shares, physical_mesh(program.group, jax.devices()[:4]))


def test_the_compiled_program_names_ops_and_what_is_moved() -> None:
    step = lowered(tensor_parallel)
    # XLA writes "update/(add/add:mul/mul)" for what it merges
    names = {name.replace("/(", "/") for name in re.findall(r'op_name="([^"]*)"', step.compile().as_text())}
    for scope in ("up/dot", "down/dot~backward", "down/dot:0~adapter"):
        assert any(f"/{scope}/" in f"/{name}/" for name in names), scope
    paths = {op_scope(op) for op in step.graph.ops}
    adapters = {adapter_scope(adapt.tensor) for adapt in step.plan.program.adapters}
    of_ours = {name for name in names if name.startswith("jit(run)/shard_map/")}
    unnamed = [n for n in of_ours if not any(f"/{scope}/" in f"/{n}/" for scope in paths | adapters)]
    assert {name.removeprefix("jit(run)/shard_map/").split(".")[0] for name in unnamed} <= {"axis_index", "broadcast"}
