"""Steps whose ops lie on several device groups, apart, nested and overlapping, give one device's numbers."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jscaler
from jscaler import PlanError, Replicate, Split
from jscaler.errors import VerificationError
from jscaler.lower.flat_program import results
from jscaler.lower.level import Level
from jscaler.verification.segments import check_values

WIDTHS = (8, 12, 12, 6)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
Groups = Mapping[str, Sequence[int]]


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    for i in range(3):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ params[f"layer_{i}"]["w"] + params[f"layer_{i}"]["b"])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["layer_0"]["w"][:6]) ** 2)  # tied to the first layer's weight


def step(params: Any, state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    loss, grads = value_and_grad(lambda p: loss_of(p, x))(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": loss, "norm": optax.tree.norm(grads)}


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    params = {
        f"layer_{i}": {"w": jnp.asarray(rng.normal(size=(a, b)) / a**0.5), "b": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(WIDTHS))
    }
    return params, OPTIMIZER.init(params), jnp.asarray(rng.normal(size=(12, 8)))


def on(groups: Groups, dim: int | None = 0) -> Callable[[Any, np.ndarray], None]:
    """A policy that places the ops of each scope on a group, cut along a dim of the batch where that goes."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        along = graph.factor_of("x", dim) if dim is not None else {}
        for scope, group in groups.items():
            for op in graph.select(f"*{scope}/*", kind="forward"):
                name = along.get(op)
                fits = name is not None and graph.rule(op).factors[name].size % len(group) == 0
                part = Split(name, len(group)) if fits else Replicate(len(group))
                graph.op_assign(graph.op_trans(op, part), [int(devices[i]) for i in group])

    return policy


CASES: dict[str, tuple[Groups, int]] = {
    "stages": ({"layer_0": [0], "layer_1": [1], "layer_2": [2], "head": [3]}, 4),
    "stages in parts": ({"layer_0": [0, 1], "layer_1": [2, 3], "layer_2": [4, 5], "head": [7, 6]}, 8),
    "other sizes": ({"layer_0": [0, 1, 2], "layer_1": [4, 3], "layer_2": [5, 6, 7, 0], "head": [1]}, 8),
    "all, then some": ({"layer_0": [0, 1, 2, 3], "layer_1": [0, 1], "layer_2": [3, 2], "head": [3, 1, 2]}, 4),
    "there and back": ({"layer_0": [0, 1], "layer_1": [2, 3], "layer_2": [0, 1], "head": [2, 3]}, 4),
}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("case", CASES)
def test_optimizer_steps_are_those_of_one_device(case: str) -> None:
    """Clip, AdamW, a tied weight, a loss and a norm of leaves that lie on different groups."""
    groups, devices = CASES[case]
    with jax.enable_x64(True):
        ours = theirs = arguments()
        lowered = jscaler.parallelize(on(groups), devices=devices)(step).lower(*ours)
        assert len(lowered.plan.completed.groups) == len({frozenset(group) for group in groups.values()})
        report = jscaler.verify(lowered)
        assert report.exchanges > 0
        run, plain = lowered.compile(), jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))
        for _ in range(3):
            *ours, mine = run(*ours)
            *theirs, true = plain(*theirs)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), [ours, mine], [theirs, true])
            ours, theirs = (*ours, arguments()[2]), (*theirs, arguments()[2])


def test_state_lies_on_its_group_from_the_start() -> None:
    groups, devices = CASES["stages in parts"]
    train = jscaler.parallelize(on(groups), devices=devices, donate_argnames=("params", "state"))(step)
    params, state = train.init(lambda: arguments()[:2], x=arguments()[2])
    held = {path: {d.id for d in leaf.sharding.device_set} for path, leaf in jax.tree.leaves_with_path(params)}
    assert {jax.tree_util.keystr(path): devices for path, devices in held.items() if "layer_1" in str(path)} == {
        "['layer_1']['b']": {2, 3},
        "['layer_1']['w']": {2, 3},
    }
    before = [leaf.sharding for leaf in jax.tree.leaves(params)]
    params, state, metrics = train(params, state, arguments()[2])
    assert [leaf.sharding for leaf in jax.tree.leaves(params)] == before
    assert float(metrics["loss"]) > 0


def test_a_stage_hands_on_its_result_and_nothing_else() -> None:
    """Forward each boundary is crossed by the activation, backward by its cotangent; what is made of literals stays."""

    def plain(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for i in range(3):
                with jax.named_scope(f"layer_{i}"):
                    y = jnp.tanh(y @ params[i])
            with jax.named_scope("layer_2"):
                return jnp.mean(y**2)

        loss_, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_

    groups = {f"layer_{i}": [2 * i, 2 * i + 1] for i in range(3)}
    lowered = jscaler.parallelize(on(groups), devices=6)(plain).lower([jnp.ones((4, 4))] * 3, jnp.ones((8, 4)))
    crossed = [(t.crossing.source.mesh.devices, t.crossing.target.mesh.devices) for t in lowered.plan.transfers]
    assert sorted(crossed) == [((0, 1), (2, 3)), ((2, 3), (0, 1)), ((2, 3), (4, 5)), ((4, 5), (2, 3))]
    assert all(t.crossing.is_equal for t in lowered.plan.transfers)
    levels = sorted((block.level, block.group.devices) for block in lowered.plan.blocks)
    stages = [(0, 1), (2, 3), (4, 5), (2, 3), (0, 1)]
    assert levels == [(Level(crossings), devices) for crossings, devices in enumerate(stages)]
    shown = lowered.plan.explain()
    assert "crosses" in shown
    assert len(lowered.plan.report.as_json()["crossings"]) == 4


def test_keys_cross_whole() -> None:
    """An array of keys is cut on the one group, and wanted by three devices of the other; a mask is one device's."""

    def draw(keys: jax.Array) -> jax.Array:
        with jax.named_scope("fold"):
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 3))(keys)
        with jax.named_scope("draw"):
            return jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)

    def policy(graph: Any, devices: np.ndarray) -> None:
        for scope, group in (("fold", [0, 1]), ("draw", [2, 3, 4])):
            for op in graph.select(f"{scope}/*"):
                graph.op_assign(graph.op_trans(op, Replicate(len(group))), [int(devices[i]) for i in group])

    keys = jax.random.split(jax.random.key(0), 4)
    lowered = jscaler.parallelize(policy, devices=5)(draw).lower(keys)
    assert [jnp.issubdtype(t.tensor.dtype, jax.dtypes.prng_key) for t in lowered.plan.transfers] == [True]
    jscaler.verify(lowered)
    np.testing.assert_array_equal(lowered.compile()(keys), jax.jit(draw)(keys))


def test_order_across_groups() -> None:
    def two(x: jax.Array) -> list[jax.Array]:
        with jax.named_scope("a"):
            a = jnp.sin(x)
        with jax.named_scope("b"):
            return [a, jnp.cos(x)]

    def policy(graph: Any, devices: np.ndarray) -> None:
        on({"a": [0], "b": [1]})(graph, devices)
        graph.op_order(graph["b/cos"], graph["a/sin"])

    lowered = jscaler.parallelize(policy, devices=2)(two).lower(jnp.ones(4))
    made = [(b.flat.origins.op[v], b.level) for b in lowered.plan.blocks for item in b.flat.items for v in results(item)]
    at = dict(made)
    assert at["a/sin"] > at["b/cos"]


def test_a_loop_over_groups_is_refused() -> None:
    def loop(x: jax.Array, ws: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("up"):
                y = x @ w
            with jax.named_scope("down"):
                return jnp.tanh(y) @ w.T, None

        return jax.lax.scan(body, x, ws)[0]

    with pytest.raises(PlanError, match=r"has ops on several device groups, '.*up/dot' on \[0\] and '.*' on \[1\]"):
        jscaler.parallelize(on({"up": [0], "down": [1]}), devices=2)(loop).lower(jnp.ones((2, 4)), jnp.ones((3, 4, 4)))


def test_what_is_of_one_group_alone_says_so() -> None:
    groups, devices = CASES["stages"]
    lowered = jscaler.parallelize(on(groups), devices=devices)(step).lower(*arguments())
    for ask in (lambda: lowered.lowered, lambda: lowered.plan.program):
        with pytest.raises(PlanError, match=r"on several device groups, as \d+ executables: .* is of a step on one"):
            ask()


def test_a_value_that_is_taken_otherwise_than_it_was_left_is_noticed() -> None:
    groups, devices = CASES["stages in parts"]
    plan = jscaler.parallelize(on(groups), devices=devices)(step).lower(*arguments()).plan
    first, *rest = plan.transfers
    wrong = dataclasses.replace(first, crossing=plan.transfers[-1].crossing)
    with pytest.raises(VerificationError, match="crosses from another layout than it was left in"):
        check_values(dataclasses.replace(plan, transfers=(wrong, *rest)))
    with pytest.raises(VerificationError, match="taken from another segment, and none leaves it"):
        check_values(dataclasses.replace(plan, transfers=tuple(rest)))
