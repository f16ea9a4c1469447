"""Training in pipelines beyond one plain gradient: frozen layers, several gradients in a step, modules, few bits."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from losing import losing
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from jscaler import PlanError, PlanWarning, plans
from jscaler.lower.program import Adapt, Repeat
from jscaler.tables.one_f_one_b import one_f_one_b

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
WIDTH, LAYERS = 4, 4
Make = Callable[..., Any]  # a step, given who differentiates


def layers(seed: int = 0) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 2 * LAYERS))
    shapes = {"up": (WIDTH, 8), "down": (8, WIDTH)}
    return {
        f"layer_{i}": {name: 0.5 * jax.random.normal(next(keys), shape, float) for name, shape in shapes.items()}
        for i in range(LAYERS)
    }


def stack(seed: int = 0) -> dict[str, Any]:
    return {"layers": jax.tree.map(lambda *parts: jnp.stack(parts), *layers(seed).values())}


def forward(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    if "layers" in params:
        return jax.lax.scan(layer, x, params["layers"])[0]
    for name in sorted(params):
        with jax.named_scope(name):
            x, _ = layer(x, params[name])
    return x


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (16, WIDTH), float)


def same_steps(make: Make, state: Any, plan: str, devices: int, steps: int = 3) -> Any:
    """The plan's steps are proven, and those of `jax.jit`."""
    x, ours, theirs = inputs(), state, state
    train = jscaler.parallelize(plans.by_name(plan), devices=devices)(make(jscaler.value_and_grad))
    lowered = train.lower(ours, x)
    jscaler.verify(lowered)
    plain = jax.jit(make(jax.value_and_grad))
    for _ in range(steps):
        (ours, loss), (theirs, true) = train(ours, x), plain(theirs, x)
        assert_trees_close(loss, true)
    assert_trees_close(ours, theirs)
    return lowered


# -- frozen layers


def of_a_part(frozen: Any) -> Any:
    """The gradient of some layers; the others are state that comes back as it was."""

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            (free, fixed), moments = state
            loss, grads = value_and_grad(lambda p: jnp.mean(forward({**p, **fixed}, x) ** 2))(free)
            updates, moments = TX.update(grads, moments, free)
            return ((optax.apply_updates(free, updates), fixed), moments), loss

        return step

    free = {name: own for name, own in layers().items() if name not in frozen}
    fixed = {name: own for name, own in layers().items() if name in frozen}
    return make, ((free, fixed), TX.init(free))


def stopped(frozen: Any, params: Any = None) -> Any:
    """`jax.lax.stop_gradient` over some of the parameters, at the beginning of the loss."""

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, moments = state

            def loss_of(params: Any) -> jax.Array:
                held = {name: jax.lax.stop_gradient(own) if name in frozen else own for name, own in params.items()}
                head = held.pop("head") if "head" in held else jnp.eye(WIDTH)
                return jnp.mean((forward(held, x) @ head) ** 2)

            loss, grads = value_and_grad(loss_of)(params)
            updates, moments = TX.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), loss

        return step

    params = params or layers()
    return make, (params, TX.init(params))


def zeroed(frozen: Any) -> Any:
    """`optax.set_to_zero` for some of the parameters."""
    labels = {name: "off" if name in frozen else "on" for name in layers()}
    optimizer = optax.multi_transform({"on": TX, "off": optax.set_to_zero()}, labels)

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, moments = state
            loss, grads = value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), loss

        return step

    return make, (layers(), optimizer.init(layers()))


FROZEN: Mapping[str, tuple[str, ...]] = {
    "first": ("layer_0", "layer_1"),
    "last": ("layer_2", "layer_3"),
    "middle": ("layer_2",),
    "ends": ("layer_0", "layer_3"),
}
PLANS = {  # plan -> devices
    "pipeline(2, 2, batch='x')": 2,
    "pipeline(4, 4, batch='x')": 4,
    "pipeline(4, 4, 'gpipe', batch='x')": 4,
    "pipeline(2, 2, plan=tensor_parallel(columns=['*/up']), batch='x')": 4,
    "pipeline(2, 2, 'gpipe', plan=zero3('x'), batch='x')": 4,
    "pipeline(2, 4, plan=zero3('x', gather_once=True), batch='x')": 4,
}
HOW = (of_a_part, stopped, zeroed)
left_out = pytest.mark.filterwarnings("ignore:the schedule '.*' has .*B, for which:jscaler.PlanWarning")


@left_out
@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("how", "where", "plan"), of_the_day([(h, w, p) for h in HOW for w in FROZEN for p in PLANS], 12))
def test_layers_may_be_frozen(how: Any, where: str, plan: str) -> None:
    with jax.enable_x64(True):
        same_steps(*how(FROZEN[where]), plan, PLANS[plan])


def test_first_stages_that_are_frozen_go_forward_alone() -> None:
    with jax.enable_x64(True):
        make, state = of_a_part(FROZEN["first"])
        policy = plans.pipeline(4, 2, "gpipe", at=["layer_1", "layer_2", "layer_3"], batch="x")
        lowered = jscaler.parallelize(policy, devices=4)(make(jscaler.value_and_grad))
        with pytest.warns(PlanWarning, match="the schedule 'gpipe' has 0B, 1B, for which this step has no block"):
            table = lowered.lower(state, inputs()).plan.instructions.table
    assert str(table) == "0F0 0F1\n1F0 1F1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B0 3B1"


def test_what_is_made_of_parameters_first_stands_in_no_stage_s_way() -> None:
    """A ``stop_gradient``, or a cast, of all parameters at once: each stage makes its own."""
    with jax.enable_x64(True):
        make, state = stopped(FROZEN["last"])
        train = jscaler.parallelize(plans.pipeline(4, 2, at=["layer_1", "layer_2", "layer_3"], batch="x"), devices=4)
        plain = jscaler.parallelize(plans.pipeline(4, 2, batch="x"), devices=4)
        named, found = (one(make(jscaler.value_and_grad)).lower(state, inputs()).plan for one in (train, plain))
    rows = [[(row.first, row.last) for row in plan.report.blocks] for plan in (named, found)]
    assert rows[0] == rows[1]


@left_out
@pytest.mark.parametrize("plan", of_the_day(PLANS))
def test_a_stack_may_be_frozen_as_a_whole(plan: str) -> None:
    with jax.enable_x64(True):
        params = stack() | {"head": jax.random.normal(jax.random.key(7), (WIDTH, 2), float)}
        same_steps(*stopped(("layers",), params), plan, PLANS[plan])


def test_a_norm_for_logging_follows_the_stages() -> None:
    with jax.enable_x64(True):
        make, state = stopped(())
        train = jscaler.parallelize(plans.pipeline(2, 2, batch="x"), devices=2)(make(jscaler.value_and_grad))
        params = train(state, inputs())[0][0]
        norm = train.follow(lambda params: optax.tree.norm(params), paths={"params": "state/0"})
        by_hand = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(params)) ** 0.5
        assert abs(float(norm(params)) - by_hand) < 1e-9


# -- updates, and what is drawn for them


def test_an_update_may_have_loops() -> None:
    """Muon's steps of Newton and Schulz are a loop for each kernel; a loop's counter reads nothing that has a home."""
    optimizer = optax.contrib.muon(1e-2)

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, moments = state
            loss, grads = value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
            updates, moments = optimizer.update(grads, moments, params)
            updates = jax.tree.map(lambda u: jax.lax.fori_loop(0, 3, lambda i, u: u * (1 + 0.1 * i), u), updates)
            return (optax.apply_updates(params, updates), moments), loss

        return step

    with jax.enable_x64(True):
        lowered = same_steps(make, (layers(), optimizer.init(layers())), "pipeline(2, 2, batch='x')", 2)
    inside = {op.path for op in lowered.plan.graph.ops if op.loop is not None and op.kind == "update"}
    groups = {lowered.plan.completed.homes[path].group.devices for path in inside}
    assert groups == {(0,), (1,)}


@pytest.mark.parametrize("plan", ["pipeline(2, 4, batch='x')", "accumulate(4, batch='x')"])
def test_a_mask_may_be_drawn_by_a_key_of_the_state(plan: str) -> None:
    """As BERT and MAE do, outside of the loss: where it is read it is made, and its count is no reason for two loops."""

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, key, number = state
            mask = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, (x.shape[0],))

            def loss_of(params: Any) -> jax.Array:
                with jax.named_scope("embed"):
                    masked = jnp.where(mask[:, None], params["layer_0"]["down"][0], x)
                y = forward(params, masked)
                return jnp.sum(jnp.mean((y - x) ** 2, -1) * mask) / jnp.sum(mask)

            loss, grads = value_and_grad(loss_of)(params)
            return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key, number + 1), loss

        return step

    with jax.enable_x64(True):
        lowered = same_steps(make, (layers(), jax.random.key(3), jnp.int32(0)), plan, 1 if "acc" in plan else 2)
    assert [loop.time for loop in lowered.plan.graph.loops.values()] == ["microbatch"]
    assert not any("random" in transfer.tensor.name for transfer in lowered.plan.transfers)


# -- several gradients in a step


def two_losses(params: Any) -> Any:
    """Of the same parameters."""

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, moments = state
            first, grads = value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
            second, more = value_and_grad(lambda p: jnp.mean(jnp.abs(forward(p, x / 2 + 1))))(params)
            grads = jax.tree.map(lambda a, b: a + 0.3 * b, grads, more)
            updates, moments = TX.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), (first, second)

        return step

    return make, (params(), TX.init(params()))


def adversaries(params: Any, in_turn: bool = False) -> Any:
    """A generator and a critic, each with a gradient of its own; ``in_turn``, the generator's is of the new critic."""

    def make(value_and_grad: Any) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            (made, judge), moments = state

            def of_judge(judge: Any) -> jax.Array:
                fake, real = forward(judge, forward(made, x)), forward(judge, 2 * x)
                return jnp.mean(jax.nn.softplus(fake)) + jnp.mean(jax.nn.softplus(-real))

            loss, grads = value_and_grad(of_judge)(judge)
            updates, second = TX.update(grads, moments[1], judge)
            new = optax.apply_updates(judge, updates)
            against = new if in_turn else judge
            other, grads = value_and_grad(lambda p: jnp.mean(jax.nn.softplus(-forward(against, forward(p, x)))))(made)
            updates, first = TX.update(grads, moments[0], made)
            return ((optax.apply_updates(made, updates), new), (first, second)), (loss, other)

        return step

    state = params(), params(1)
    return make, (state, tuple(map(TX.init, state)))


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("how", "params", "plan"),
    of_the_day([(h, p, n) for h in (two_losses, adversaries) for p in (layers, stack) for n in PLANS], 8),
)
def test_gradients_that_do_not_wait_for_each_other_share_the_loop(how: Any, params: Any, plan: str) -> None:
    with jax.enable_x64(True):
        lowered = same_steps(*how(params), plan, PLANS[plan], steps=2)
    loops = [loop for loop in lowered.plan.graph.loops.values() if loop.time == "microbatch"]
    assert len(loops) == 1
    assert len({op.call for op in lowered.plan.graph.ops if op.loop == loops[0].name} - {None}) == 2


def test_each_loss_goes_through_all_stages() -> None:
    with jax.enable_x64(True):
        make, state = two_losses(layers)
        train = jscaler.parallelize(plans.pipeline(4, 4, batch="x", at=[f"layer_{i}" for i in (1, 2, 3)]), devices=4)
        lowered = train(make(jscaler.value_and_grad)).lower(state, inputs())
    assert lowered.plan.instructions.table == one_f_one_b(4, 4)


@pytest.mark.one_day_in(2)
@losing  # a second loop over micro-batches, as it must be
def test_a_gradient_at_what_another_has_changed_is_a_loop_of_its_own() -> None:
    """On two stages each lies on one of them; on more they cannot be cut."""
    with jax.enable_x64(True):
        make, state = adversaries(layers, in_turn=True)
        same_steps(make, state, "pipeline(2, 2, batch='x')", 2, steps=2)
        said = r"'update/\S+' \(at .* needs 'd\(.* of all micro-batches, which '.*' makes, and a gradient is taken at"
        with pytest.raises(PlanError, match=said):
            jscaler.parallelize(plans.pipeline(4, 2, batch="x"), devices=4)(make(jscaler.value_and_grad)).lower(
                state, inputs()
            )


# -- parameters in parts, put together once


@pytest.mark.parametrize("params", of_the_day([layers, stack], 2))
def test_zero3_gathers_once_a_step_if_that_is_asked_for(params: Any) -> None:
    """In front of the loop, each stage its own; gradients are scattered in it."""
    with jax.enable_x64(True):
        make, state = stopped((), params())
        lowered = same_steps(make, state, "pipeline(2, 4, plan=zero3('x', gather_once=True), batch='x')", 4)
    found = {(s.program.phase, s.program.group.devices): kinds(s.program.tasks) for s in lowered.plan.segments}
    for devices in ((0, 1), (2, 3)):
        assert found[0, devices]["all_gather"] > 0
        assert "all_gather" not in found[1, devices]
        assert found[1, devices]["reduce_scatter"] > 0


def kinds(tasks: Any) -> Counter[str]:
    """The collectives among ``tasks``, and in loops in them."""
    found = Counter(step.kind for task in tasks if isinstance(task, Adapt) for step in task.adapter.steps)
    return sum((kinds(task.tasks) for task in tasks if isinstance(task, Repeat)), found)


# -- modules


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(8, name="up")(x))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        many = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return many(name="layers")(x, None)[0]


class Twin(nnx.Module):
    """Layers in a row, dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(jnp.tanh(self.up(x))))


STACKED = {p.replace("'x'", "'batch'").replace("'*/up'", "'*/up/kernel'"): n for p, n in PLANS.items() if "zero" not in p}


@pytest.mark.parametrize("plan", of_the_day(STACKED))
def test_a_stack_of_linen_layers_goes_through_the_stages(plan: str) -> None:
    """Its parameters lie where they are used, like those of a training step, though no gradient is taken of them."""
    x = inputs().astype(jnp.float32)
    variables = Stack().init(jax.random.key(0), x)
    model = jscaler.parallelize(plans.by_name(plan), devices=STACKED[plan])(Stack())
    jscaler.verify(model.lower(variables, x))
    assert_trees_close(model.apply(variables, x), Stack().apply(variables, x))
    kernel = model.place(variables, x)["params"]["layers"]["up"]["kernel"]
    assert kernel.sharding.spec[0] == "stages"


def test_an_nnx_module_goes_through_the_stages() -> None:
    theirs, ours = Twin(nnx.Rngs(0)), jscaler.parallelize(plans.pipeline(2, 4), devices=2)(Twin(nnx.Rngs(0)))
    assert str(ours.lower(inputs().astype(jnp.float32)).plan.instructions.table) == "0F0 0F1 0F2 0F3\n1F0 1F1 1F2 1F3"
    for _ in range(2):  # the counts of its keys go on
        x = inputs().astype(jnp.float32)
        assert_trees_close(ours(x), theirs(x))
    assert_trees_close(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
