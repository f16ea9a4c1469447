"""Pipelines of layers that are one loop: stages take ranges of the stack, and of its parameters and their state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from of_the_day import of_the_day

import jscaler
from jscaler import PlanError, VerificationError, plans
from jscaler.errors import DeletedArgumentError
from jscaler.lower.alike import program_keys
from models.gpt import GPT, GPTConfig

OPTIMIZER = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 3)
HIDDEN = 4


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> Any:
        h = jnp.tanh(x @ p["up"])
        return x + h @ p["down"] + p["bias"], (h**2).mean()

    y, sizes = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.mean((y @ params["head"]) ** 2) + 0.01 * sizes.sum()


def step(state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    params, moments = state
    loss, grads = value_and_grad(loss_of)(params, x)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def plain_step(state: Any, x: jax.Array) -> Any:
    return step(state, x, jax.value_and_grad)


def make_state(layers: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"up": (layers, HIDDEN, 8), "down": (layers, 8, HIDDEN), "bias": (layers, HIDDEN)}
    params = {
        "first": jax.random.normal(next(keys), (3, HIDDEN), float),
        "layers": {name: 0.3 * jax.random.normal(next(keys), shape, float) for name, shape in shapes.items()},
        "head": jax.random.normal(next(keys), (HIDDEN, 2), float),
    }
    return params, OPTIMIZER.init(params)


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(9), (16, 3), float)


def check(ours: Any, theirs: Any, rtol: float = 1e-9) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol / 100), *jax.device_get((ours, theirs)))


def check_plan(name: str, devices: int) -> None:
    """That a plan is proven, and has one device's numbers through three steps."""
    with jax.enable_x64(True):
        theirs, x = make_state(4), inputs()
        train = jscaler.parallelize(plans.by_name(name), devices=devices, donate_argnames="state")(step)
        jscaler.verify(train.lower(theirs, x))
        ours, plain = train.init(make_state, 4, x=x), jax.jit(plain_step)
        check(ours, theirs)
        for _ in range(3):
            (ours, loss), (theirs, true) = train(ours, x), plain(theirs, x)
            np.testing.assert_allclose(loss, true, rtol=1e-10)
        check(ours, theirs)


UP = "columns=['*/up']"
CASES = {  # plan -> devices, layers
    "pipeline(2, 2, batch='x')": (2, 2),
    "pipeline(2, 2, batch='x', layers=[2, 1])": (2, 3),
    "pipeline(4, 4, 'gpipe', batch='x')": (4, 8),
    "pipeline(4, 4, batch='x')": (4, 13),
    "pipeline(3, 2, 'gpipe', plan=data_parallel('x'), batch='x')": (6, 7),
    f"pipeline(2, 4, plan=tensor_parallel({UP}), batch='x')": (4, 4),
    f"pipeline(2, 2, 'gpipe', plan=tensor_parallel({UP}), batch='x')": (4, 3),
    "pipeline(2, 2, plan=zero1('x'), batch='x')": (4, 4),
    "pipeline(2, 2, plan=zero3('x'), batch='x')": (4, 6),
    "pipeline(2, 4, plan=zero3('x'), batch='x')": (4, 3),
    "pipeline(2, 2, plan=recompute_layers(), batch='x')": (2, 4),
    "pipeline(2, 2, 'gpipe', layers=[3, 1], plan=recompute_layers(data_parallel('x')), batch='x')": (4, 4),
    "pipeline(2, 2, plan=co_shard(2, on={'*/up': 2}, loss=False), batch='x')": (2, 4),
    "pipeline(3, 2, 'gpipe', plan=co_shard(2, on={'*/up': 2}, loss=False), batch='x')": (3, 4),
    f"megatron(dp=2, tp=2, pp=2, microbatches=2, {UP}, vocab=False, batch='x')": (8, 2),
    f"megatron(dp=2, tp=2, pp=2, zero=1, microbatches=2, {UP}, vocab=False, batch='x')": (8, 5),
    f"megatron(dp=2, tp=2, pp=2, zero=3, microbatches=2, {UP}, vocab=False, batch='x', schedule='gpipe')": (8, 4),
}


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize("name", of_the_day(CASES, 3))
def test_optimizer_steps_are_those_of_one_device(name: str) -> None:
    devices, layers = CASES[name]
    with jax.enable_x64(True):
        ours = theirs = make_state(layers)
        x = inputs()
        train = jscaler.parallelize(plans.by_name(name), devices=devices, donate_argnames="state")(step)
        jscaler.verify(train.lower(ours, x))
        ours, plain = jax.tree.map(jnp.copy, ours), jax.jit(plain_step)
        for _ in range(3):
            (ours, loss), (theirs, true) = train(ours, x), plain(theirs, x)
            np.testing.assert_allclose(loss, true, rtol=1e-10)
        check(ours, theirs)


@pytest.fixture(scope="module")
def staged() -> Any:
    """Two stages of two layers each, on two devices each, behind one step."""
    plan = plans.pipeline(2, 2, plan=plans.tensor_parallel(columns=["*/up"]), batch="x")
    train = jscaler.parallelize(plan, devices=4, donate_argnames="state")(step)
    state = train.init(make_state, 4, x=inputs())
    return train, state


@pytest.mark.one_day_in(2)
def test_a_stack_is_one_array_whose_parts_the_stages_have(staged: Any) -> None:
    train, first = staged
    state = jax.tree.map(jnp.copy, first)
    for params in (state[0], state[1].inner_state[1][0].mu, state[1].inner_state[1][0].nu):
        up = params["layers"]["up"]
        assert isinstance(up.sharding, NamedSharding)
        assert up.sharding.spec == P("stages", None, "x0")
        assert [[d.id for d in row] for row in up.sharding.mesh.devices] == [[0, 1], [2, 3]]
        assert {d.id for d in params["head"].sharding.device_set} == {2, 3}
    compiled = train.lower(state, inputs()).compile()
    ends = compiled.lowered.executable.ins
    end = next(e for e in ends.stacked if compiled.lowered.leaf_names[e.number] == "state/0/layers/up")
    leaf = state[0]["layers"]["up"]
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards}
    parts = end.taken_apart(leaf)
    assert [part.shape for part in parts] == [(2, HIDDEN, 8)] * 2
    for part in (*parts, end.joined(parts)):
        assert all(s.data.unsafe_buffer_pointer() == pointers[s.device] for s in part.addressable_shards)
    ends = dataclasses.replace(ends, stacked=tuple(dataclasses.replace(e, parts=e.parts[::-1]) for e in ends.stacked))
    wrong = dataclasses.replace(compiled.lowered.executable, ins=ends)
    with pytest.raises(VerificationError, match=r"input \d+, in parts: device 2 has .* of the leaf, .* of its part"):
        jscaler.verify(dataclasses.replace(compiled.lowered, executable=wrong))
    after, _ = train(state, inputs())
    check(after, jax.jit(plain_step)(jax.device_get(first), inputs())[0], 1e-4)
    assert leaf.is_deleted()
    with pytest.raises(DeletedArgumentError, match="state/0/layers/up"):
        train(state, inputs())


def test_each_stage_makes_its_own_part_of_the_state(staged: Any) -> None:
    train, state = staged
    check(state, jax.jit(make_state, static_argnums=0)(4), 1e-6)
    abstract = train.abstract_state(make_state, 4, x=inputs())
    for a, b in zip(*map(jax.tree.leaves, (abstract, state)), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_an_evaluation_and_averages_follow_the_stages(staged: Any) -> None:
    train, first = staged
    state = jax.tree.map(jnp.copy, first)
    x = inputs()
    evaluate = train.follow(lambda state, x: loss_of(state[0], x))
    np.testing.assert_allclose(evaluate(state, x), loss_of(jax.device_get(state[0]), x), rtol=1e-5)
    lowered = evaluate.lower(state, x)
    assert lowered.executable.in_shardings[:-1] == tuple(leaf.sharding for leaf in jax.tree.leaves(state))
    assert str(lowered.plan.instructions.table) == "0F0 0F1\n1F0 1F1"

    def average(mean: Any, state: Any) -> Any:
        return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, mean, state[0])

    averaged = train.follow(average, paths={"mean": "state/0", "state": "state"})
    new = averaged(jax.tree.map(jnp.copy, state[0]), state)
    check(new, state[0], 1e-5)
    assert jax.tree.map(lambda a: a.sharding, new) == jax.tree.map(lambda a: a.sharding, state[0])
    assert not averaged.lower(state[0], state).plan.transfers


@pytest.mark.one_day_in(2)
def test_a_leaf_whose_update_needs_all_layers_is_one_array() -> None:
    """As Muon's of a stack of biases, which are one matrix to it; the stages have their parts of the others."""

    def mixing(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        loss, grads = value_and_grad(loss_of)(params, x)
        bias = grads["layers"]["bias"]
        grads["layers"]["bias"] = bias / (1 + jnp.sum(bias**2, axis=0))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, _ = make_state(2)
    ours = jscaler.parallelize("pipeline(2, 2, batch='x')", devices=2)(mixing)(params, inputs())
    want = jax.jit(lambda p, x: mixing(p, x, jax.value_and_grad))(params, inputs())
    check(ours, want, 1e-5)
    stages = {name: "stages" in str(leaf.sharding) for name, leaf in ours[0]["layers"].items()}
    assert stages == {"bias": False, "down": True, "up": True}


def looking_twice(params: Any, state: Any, x: jax.Array) -> Any:
    """A gradient that no plan sees, as of an estimate of the curvature; it reads the parameters as a whole."""
    return jax.tree.map(jnp.add, state, jax.grad(loss_of)(params, x))


def along_a_draw(params: Any, state: Any, x: jax.Array) -> Any:
    """A second derivative along what each stage draws, as of Hutchinson's estimate of the curvature."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(state["head"][0, 0].astype(int)), len(leaves))
    drawn = [jax.random.normal(key, p.shape, p.dtype) for key, p in zip(keys, leaves, strict=True)]
    drawn = jax.tree.unflatten(tree, drawn)
    _, curved = jax.jvp(lambda p: jax.grad(loss_of)(p, x), (params,), (drawn,))
    return jax.tree.map(lambda s, d, c: s + 0.1 * d * c, state, drawn, curved)


def by_a_product(params: Any, state: Any, x: jax.Array) -> Any:
    """State that reads nothing but state, and a product of all layers of it, as of D-Adaptation's distance."""
    roots = jax.tree.map(lambda s: jnp.sqrt(jnp.abs(s) + 1), state)
    distance = sum(jnp.vdot(r, r) for r in jax.tree.leaves(roots))
    return jax.tree.map(lambda s, r, p: s + 0.1 * p / (r + distance), state, roots, params)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("update", "plan", "devices"), [
    (looking_twice, "pipeline(2, 2, batch='x')", 2),
    (looking_twice, f"pipeline(2, 2, plan=tensor_parallel({UP}), batch='x')", 4),
    (along_a_draw, "pipeline(2, 2, batch='x')", 2),
    (by_a_product, "pipeline(2, 2, batch='x')", 2),
])  # fmt: skip
def test_parts_lie_with_their_range_whoever_reads_them_first(update: Any, plan: str, devices: int) -> None:
    def step(state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        params, moments = state
        loss, grads = value_and_grad(loss_of)(params, x)
        moments = update(params, moments, x)
        return (jax.tree.map(lambda p, g, m: p - 0.1 * g - 0.01 * m, params, grads, moments), moments), loss

    with jax.enable_x64(True):
        params, _ = make_state(2)
        state = params, jax.tree.map(jnp.ones_like, params)
        ours = jscaler.parallelize(plan, devices=devices)(step)(state, inputs())
        check(ours, jax.jit(lambda s, x: step(s, x, jax.value_and_grad))(state, inputs()))
        up = ours[0][0]["layers"]["up"]
        assert up.sharding.shard_shape(up.shape) == (1, HIDDEN, 8 * 2 // devices)


def test_small_moments_are_where_their_parameters_are() -> None:
    """Though an update that reads many scalars of the state would be cheaper where these are."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0.0, 10))

    def injected(state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        loss, grads = value_and_grad(loss_of)(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), loss

    with jax.enable_x64(True):
        params, _ = make_state(2)
        params["layers"]["bias"] = params["layers"]["bias"][:, 0]  # a number per layer
        state = params, optimizer.init(params)
        ours = jscaler.parallelize("pipeline(2, 2, batch='x')", devices=2)(injected)(state, inputs())
        check(ours, jax.jit(lambda s, x: injected(s, x, jax.value_and_grad))(state, inputs()))


@pytest.mark.one_day_in(2)
def test_noise_of_all_leaves_is_drawn_by_one_op() -> None:
    noise = optax.add_noise(eta=0.1, gamma=0.5, key=3)

    def noisy(state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        loss, grads = value_and_grad(loss_of)(state[0], x)
        updates, drawn = noise.update(grads, state[1], state[0])
        return (jax.tree.map(lambda p, u: p - 0.1 * u, state[0], updates), drawn), loss

    params, _ = make_state(2)
    (ours, _), loss = jscaler.parallelize("pipeline(2, 2, batch='x')", devices=2)(noisy)(
        (params, noise.init(params)), inputs()
    )
    plain = jax.jit(lambda s, x: noisy(s, x, jax.value_and_grad))
    (want, _), want_loss = plain((params, noise.init(params)), inputs())
    check((ours, loss), (want, want_loss), 1e-5)


@pytest.mark.one_day_in(2)
def test_layers_of_stages_are_as_asked_for_or_even() -> None:
    x = jax.ShapeDtypeStruct((16, 3), "float32")

    def state_of(layers: int) -> Any:
        return jax.eval_shape(lambda: make_state(layers))

    def ranges(count: int, **more: Any) -> list[str]:
        policy = plans.pipeline(4, 4, batch="x", **more)
        lowered = jscaler.parallelize(policy, devices=4)(step).lower(state_of(count), x)
        loops = [loop for loop in lowered.plan.source.loops.values() if loop.forward is None]
        return [loop.name.removeprefix("0/layers/scan") for loop in loops]

    assert ranges(12) == ["[0:3]", "[3:6]", "[6:9]", "[9:12]"]
    assert ranges(13) == ["[0:4]", "[4:7]", "[7:10]", "[10:13]"]
    assert ranges(12, layers=[2, 4, 4, 2]) == ["[0:2]", "[2:6]", "[6:10]", "[10:12]"]
    with pytest.raises(PlanError, match=r"layers=\[4, 4, 4\] are 12 layers of one loop on 3 stages; there are 4 stages"):
        ranges(12, layers=[4, 4, 4])
    with pytest.raises(PlanError, match=r"layers=\[4, 4, 4, 4\] are 16 layers .* loops over layers with 12"):
        ranges(12, layers=[4, 4, 4, 4])
    with pytest.raises(PlanError, match="is 9 ops, layers and loops in a row, too few for 16 stages"):
        jscaler.parallelize(plans.pipeline(16, 2, batch="x"), devices=16)(step).lower(state_of(3), x)


@pytest.mark.one_day_in(2)
def test_two_stacks_are_even_if_that_costs_little_and_they_are_large() -> None:
    """Layers of the second take longer: other ranges would be faster, and gathered on every device."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for name in ("encoder", "decoder"):
            x = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w[0]) @ w[1], None), x, params[name])[0]
        return x.sum()

    def ranges(layers: int, width: int, wider: float) -> list[str]:
        sizes = {"encoder": width, "decoder": int(width * wider)}
        params = {
            name: [jax.ShapeDtypeStruct((layers, *shape), "float32") for shape in ((width, n), (n, width))]
            for name, n in sizes.items()
        }
        policy = plans.pipeline(4, 4, batch="x")
        x = jax.ShapeDtypeStruct((4096, width), "float32")
        lowered = jscaler.parallelize(policy, devices=4)(jscaler.value_and_grad(loss)).lower(params, x)
        return [f"[{loop.name.split('[')[1]}" for loop in lowered.plan.source.loops.values() if loop.forward is None]

    assert ranges(32, 4096, 1.4) == ["[0:16]", "[16:32]"] * 2
    assert ranges(32, 4096, 2.2) != ["[0:16]", "[16:32]"] * 2
    assert ranges(32, 512, 1.4) != ["[0:16]", "[16:32]"] * 2


def test_a_model_that_is_a_stack_alone_has_two_blocks_for_each_stage_but_the_last() -> None:
    def alone(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

        loss, grads = jscaler.value_and_grad(loss_of)(w)
        return w - 0.1 * grads, loss

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 4, 4), (8, 4))]
    lowered = jscaler.parallelize(plans.pipeline(3, 2, batch="x"), devices=3, donate_argnames="w")(alone).lower(*shapes)
    assert str(lowered.plan.instructions.table) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1"
    assert [t.crossing.source.mesh.devices for t in lowered.plan.transfers] == [(0,), (1,), (2,), (1,)]


def gpt_loss(**changes: Any) -> tuple[Callable[..., Any], Any, Any]:
    kinds = {"param_dtype": jnp.float64, "dtype": jnp.float64}
    config = GPTConfig(hidden=16, layers=4, heads=2, sequence=6, vocabulary=20, stacked=True, **kinds, **changes)
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(rng.integers(0, 20, (8, 6)), jnp.int32) for name in ("tokens", "labels")}
    params = GPT(config).init(jax.random.key(0), batch["tokens"], train=False)["params"]

    def step(params: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = GPT(config).apply({"params": params}, batch["tokens"], train=True, rngs={"dropout": jax.random.key(3)})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, params, batch


@pytest.mark.one_day_in(3)
@pytest.mark.smoke
@pytest.mark.parametrize("remat", of_the_day([False, True], 2))
def test_a_gpt_with_dropout_and_tied_embeddings(remat: bool) -> None:
    with jax.enable_x64(True):
        step, params, batch = gpt_loss(remat=remat)
        train = jscaler.parallelize(plans.megatron(dp=2, tp=2, pp=2, microbatches=2), devices=8)(step)
        check(train(params, batch), jax.jit(lambda *args: step(*args, jax.value_and_grad))(params, batch))
        plan = train.lower(params, batch).plan
        sent = {transfer.tensor.name for transfer in plan.sent}
        assert sent
        assert not any("params/blocks/mlp/up/kernel" in name for name in sent)  # parameters of the stack stay
        assert all(len({t.crossing.source.mesh, t.crossing.target.mesh}) == 2 for t in plan.transfers)
        names = [plan.block_name(number) for number in range(len(plan.blocks))]
        program = dict(zip(names, program_keys(plan.blocks), strict=True))
        assert (program["0F"], program["0B"]) == (program["1F"], program["1B"])
        assert {"0F end", "0B end", "1F 1B end"} <= {*names}
