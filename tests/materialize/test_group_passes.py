"""The passes over a graph on several groups: numbers stay, fewer values cross, and each does what it is for."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from capture.reference import interpret_ops

import jscaler
from jscaler import plans
from jscaler.ir import Op, PTensor
from jscaler.ir.loop import chain_of
from jscaler.ir.passes import name_of
from jscaler.ir.walk import closure
from jscaler.materialize.group_passes import GROUP_PASSES, fences_apart, made_where_read
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.mesh import DeviceMesh

WIDTH, MICROBATCHES = 4, 4
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lambda count: 0.01 / (1 + count)))
NAMES = [name_of(pass_name) for pass_name in GROUP_PASSES]


def train_step(state: Any, batch: Any) -> Any:
    """A tied table, a mask and a product that two stages read, a memory that all later layers read, a norm of gradients."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        with jax.named_scope("mask"):
            mask = (batch["y"] > 0).astype(jnp.float32)[:, None]
        with jax.named_scope("product"):
            product = batch["x"] @ jnp.eye(WIDTH)
        with jax.named_scope("layer_0"):
            memory = h = jnp.tanh(product @ params["tied"]) * mask
        for i, w in enumerate(params["layers"], 1):
            with jax.named_scope(f"layer_{i}"):
                h = h + jnp.tanh(h @ w) * jnp.tanh(memory @ w)
        with jax.named_scope("head"):
            return jnp.mean(((h + product) @ params["tied"].T) ** 2 * mask)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    updates, moments = TX.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss, "norm": optax.tree.norm(grads)}


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"tied": normal(WIDTH, WIDTH), "layers": [normal(WIDTH, WIDTH) for _ in range(4)]}
    return (params, TX.init(params)), {"x": normal(8, WIDTH), "y": jnp.arange(8) % 3}


POLICIES: dict[str, tuple[Callable[[], Any], int]] = {
    "two stages": (lambda: plans.pipeline(2, MICROBATCHES, at=["layer_2"], batch="batch/*"), 2),
    "three stages": (lambda: plans.pipeline(3, MICROBATCHES, at=["layer_1", "layer_3"], batch="batch/*"), 3),
    "there and back": (
        lambda: plans.pipeline(2, MICROBATCHES, "zb_v", at=["layer_1", "layer_3", "head"], batch="batch/*"),
        2,
    ),
    "parameters in parts": (
        lambda: plans.pipeline(2, MICROBATCHES, "1f1b", plans.zero3("batch/*"), at=["layer_2"], batch="batch/*"),
        4,
    ),
}


@functools.cache
def graphs_of(name: str) -> dict[str, OnGroups]:
    """The graph behind each pass."""
    policy, devices = POLICIES[name]
    passes = jscaler.parallelize(policy(), devices=devices, verify=False)(train_step).lower(*arguments()).passes
    graphs = {pass_name: passes.after(pass_name) for pass_name in NAMES}
    assert all(isinstance(at, OnGroups) for at in graphs.values())
    return graphs  # type: ignore[return-value]


def behind(name: str, pass_name: str) -> OnGroups:
    return graphs_of(name)[pass_name]


def in_front(name: str, pass_name: str) -> OnGroups:
    """The graph that a pass was given; of the first its own result, which `fences_apart` moves nothing in."""
    return graphs_of(name)[NAMES[max(NAMES.index(pass_name) - 1, 0)]]


def crossings(at: OnGroups) -> Counter[tuple[PTensor, DeviceMesh]]:
    """What ops read that another group makes, by the group that reads it: how often it is sent in a step.

    The number of a micro-batch every group counts by itself.
    """
    flow, counts = at.graph.flow, Counter[tuple[PTensor, DeviceMesh]]()
    for op in at.graph.ops:
        for tensor in op.inputs:
            maker, group = flow.maker(tensor), at.of_op[op.path]
            if maker is not None and not tensor.name.endswith(":index") and at.of_op[maker.path] != group:
                inside = chain_of(at.graph.homes[tensor], at.graph.loops)
                counts[tensor, group] = math.prod(at.graph.loops[loop].length for loop in inside)
    return counts


def sent(at: OnGroups) -> int:
    return sum(crossings(at).values())


# -- all of them


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", POLICIES)
def test_numbers_are_those_of_the_step(name: str) -> None:
    """Behind all passes, op by op on whole tensors."""
    leaves = jax.tree.leaves(arguments())
    expected = jax.tree.leaves(jax.jit(train_step)(*arguments()))
    results = interpret_ops(behind(name, NAMES[-1]).graph, leaves)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pass_name", NAMES[1:])
def test_no_more_crosses_than_before(name: str, pass_name: str) -> None:
    assert sent(behind(name, pass_name)) <= sent(in_front(name, pass_name))


@pytest.mark.parametrize(
    ("pass_name", "saved"),
    [
        ("made_where_read", MICROBATCHES),  # the mask
        ("joined_behind_loops", MICROBATCHES - 1),  # the tied gradient, which crosses once
        ("joined_per_group", 2 * MICROBATCHES),  # of the memory's three gradients two
        ("summed_per_group", 2),  # of two norms
        ("one_of_equals", 2),  # of the sizes of the step
    ],
)
def test_what_a_pass_saves(pass_name: str, saved: int) -> None:
    """On two stages, each of which has two layers or more."""
    assert sent(in_front("two stages", pass_name)) - sent(behind("two stages", pass_name)) == saved


@pytest.mark.parametrize("name", POLICIES)
def test_every_op_has_a_group_and_reads_what_stands_before_it(name: str) -> None:
    for pass_name, at in graphs_of(name).items():
        assert at.homes.keys() == at.graph.by_path.keys(), pass_name
        for op in at.graph.ops:
            makers = [at.graph.producer[t] for t in op.inputs if t in at.graph.producer]
            assert all(at.graph.position[maker.path] < at.graph.position[op.path] for maker in makers), (pass_name, op.path)


def test_on_one_group_they_leave_the_graph_as_it_is() -> None:
    policy = plans.accumulate(2, plans.data_parallel("batch/*"), batch="batch/*")
    passes = jscaler.parallelize(policy, devices=2, verify=False)(train_step).lower(*arguments()).passes
    first, *others = [passes.after(pass_name) for pass_name in NAMES]
    assert all(other is first for other in others)


# -- each by itself


def readers_of(at: OnGroups, tensors: Any) -> set[DeviceMesh]:
    """The groups of the ops that read any of ``tensors``."""
    flow = at.graph.flow
    return {at.of_op[reader.path] for t in tensors for reader in flow.readers(t)}


def test_a_fence_lies_on_one_group_and_holds_what_that_reads() -> None:
    at = behind("parameters in parts", "fences_apart")
    fences = [op for op in at.graph.ops if op.anywhere == "fence" and "@fetch" in op.path]
    assert len(fences) == len({at.of_op[op.path] for op in fences}) == 2
    for op in fences:
        parameters = [t for t in op.outputs if t.shape]
        assert [readers_of(at, [t]) for t in parameters] == [{at.of_op[op.path]}] * len(parameters)
        assert [t.aval for t in op.inputs] == [t.aval for t in op.outputs]
        assert op.body is not None
        assert len(op.body.jaxpr.outvars) == len(op.outputs)
    (tied,) = (t for t in at.graph.inputs if t.name == "state/0/tied")
    assert sum(tied in op.inputs for op in fences) == 2, "both groups read the tied table, each behind its fence"


def test_what_is_given_is_made_by_every_group_that_reads_it() -> None:
    """A mask of the batch is made twice; what is made of parameters, a product, and an optimizer's step are made once."""
    at, before = behind("two stages", "made_where_read"), in_front("two stages", "made_where_read")
    copies = at.graph.by_path.keys() - before.graph.by_path.keys()
    sources = {op.path.split("@")[0] for op in at.graph.ops if op.path in copies}
    assert {path.split("/")[0] for path in sources if not path.startswith("update")} == {"batch", "mask"}
    assert all(op.kind != "forward" or not learned_of(at, op) for op in at.graph.ops if op.path in copies)
    for path in copies:
        source = before.graph[path.rsplit("@", 1)[0]]
        assert at.of_op[path] != at.of_op[source.path], "a copy is for another group"
        assert readers_of(at, at.graph[path].outputs) == {at.of_op[path]}
    for group in set(at.of_op.values()):
        masks = [op for op in at.graph.ops if op.path.startswith("mask/") and at.of_op[op.path] == group]
        assert len(masks) == 1
    assert not any("dot" in path for path in copies)


def learned_of(at: OnGroups, op: Op) -> set[str]:
    """The parameters that an op is made of."""
    flow = at.graph.flow
    tensors = closure(op.inputs, flow.operands)
    return {t.name for t in tensors if t.name.startswith("state/")}


@pytest.mark.parametrize("name", ["two stages", "three stages", "there and back"])
def test_a_tied_gradient_is_summed_where_it_is_made_and_joined_behind_the_loop(name: str) -> None:
    """The summands of a sum lie on its group: before, some came from another for each micro-batch."""
    at, before = behind(name, "joined_behind_loops"), in_front(name, "joined_behind_loops")
    joins = [op for op in at.graph.ops if op.path.endswith("@behind")]
    assert len(joins) == 1
    (join,) = joins
    assert join.loop is None
    assert len(join.inputs) == 2
    assert [t.name for t in join.outputs] == ["d(state/0/tied)"]
    finals = {carry.final: carry for loop in at.graph.loops.values() for carry in loop.carries}
    flow = at.graph.flow
    for total in join.inputs:
        carry = finals[total]
        assert carry.is_sum
        adds = at.graph.producer[carry.out]
        assert adds.inputs[0] == carry.inside
        makers = [flow.maker(t) for t in adds.inputs[1:]]
        assert {at.of_op[maker.path] for maker in makers if maker is not None} == {at.of_op[adds.path]}
    count = {
        which: sum(c.is_sum for loop in g.graph.loops.values() for c in loop.carries)
        for which, g in (("now", at), ("then", before))
    }
    assert count["now"] == count["then"] + 1


def test_gradients_of_what_many_layers_read_are_joined_per_group() -> None:
    """Each group but the memory's sends the sum of its gradients; the memory's group adds these up."""
    at = behind("three stages", "joined_per_group")
    home = next(at.of_op[op.path] for op in at.graph.ops if op.path.startswith("layer_0/tanh"))
    arriving = [
        (t, op)
        for op in at.graph.ops
        for t in op.inputs
        if t.name.startswith("d(layer_0/tanh") and at.of_op[op.path] == home
    ]
    flow = at.graph.flow
    makers = [at.of_op[maker.path] for t, _ in arriving if (maker := flow.maker(t)) is not None]
    assert Counter(group.devices for group in makers if group != home) == {(1,): 1, (2,): 1}
    joins = [
        op
        for op in at.graph.ops
        if op.outputs[0].name.startswith("d(layer_0/tanh:0)@") and len(op.inputs) > 1 and op.forward is None
    ]
    for join in joins:
        groups = {at.of_op[maker.path] for t in join.inputs if (maker := flow.maker(t)) is not None}
        assert len(groups) == 1 or at.of_op[join.path] == home


@pytest.mark.parametrize("name", ["two stages", "three stages", "parameters in parts"])
def test_a_norm_is_summed_per_group(name: str) -> None:
    """Each group sends one scalar for a norm, and every summand is in it once."""
    at, before = behind(name, "summed_per_group"), in_front(name, "summed_per_group")
    flow = at.graph.flow
    norms = [op for op in before.graph.ops if len(op.inputs) == 5 and not any(t.shape for t in op.inputs)]
    assert len(norms) == 2
    for norm in norms:
        now = at.graph[norm.path]
        sums = [op for op in at.graph.ops if op.path.startswith(f"{norm.path}@sum")]
        assert sums
        for op in sums:
            groups = {at.of_op[maker.path] for t in op.inputs if (maker := flow.maker(t)) is not None}
            assert groups == {at.of_op[op.path]}
        made_of = Counter(t for op in sums for t in op.inputs)
        made_of.update(t for t in now.inputs if t not in {out for op in sums for out in op.outputs})
        assert made_of == Counter(norm.inputs)
        arriving = [at.of_op[m.path] for t in now.inputs if not t.shape and (m := flow.maker(t)) is not None]
        assert max(Counter(arriving).values()) == 1, "two scalars come from one group"


@pytest.mark.parametrize("name", POLICIES)
def test_of_equal_results_readers_read_the_first(name: str) -> None:
    at, before = behind(name, "one_of_equals"), in_front(name, "one_of_equals")
    changed = {
        old: new
        for op in before.graph.ops
        for old, new in zip(op.inputs, at.graph[op.path].inputs, strict=True)
        if old != new
    }
    assert changed
    values = values_of(before)
    for old, new in changed.items():
        maker = before.graph.producer[old]
        assert new in maker.outputs[: maker.outputs.index(old)]
        np.testing.assert_array_equal(values[old], values[new])
    assert not changed.keys() & set(changed.values())
    assert before.graph.outputs == at.graph.outputs


def values_of(at: OnGroups) -> Mapping[PTensor, Any]:
    """What a graph's updates make, op by op."""
    tensors = [t for op in at.graph.ops if op.kind == "update" and op.loop is None for t in op.outputs]
    graph = dataclasses.replace(at.graph, outputs=tuple(tensors), output_names=(), next_version={})
    return dict(zip(tensors, interpret_ops(graph, jax.tree.leaves(arguments())), strict=True))


def test_a_fence_of_one_group_and_a_graph_without_any_stay() -> None:
    at = behind("two stages", "fences_apart")
    assert not any(op.anywhere == "fence" for op in at.graph.ops)
    assert fences_apart(at) is at
    apart = behind("parameters in parts", "fences_apart")
    again = fences_apart(apart)
    assert [op.path for op in again.graph.ops] == [op.path for op in apart.graph.ops]


def test_what_is_made_where_it_is_read_is_not_copied_again() -> None:
    at = behind("two stages", "made_where_read")
    assert made_where_read(at).graph.by_path.keys() == at.graph.by_path.keys()
