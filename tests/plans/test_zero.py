"""ZeRO: gradients are scattered once, updates are made in parts, and parameters are whole only while they are used."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plan_steps import COLUMNS, TX, assert_same_numbers, collectives, gpt, made_once, mlp, planned, with_arguments

import jscaler
from jscaler.errors import PlanError, PlanWarning, SplitError
from jscaler.lower.program import Adapt, Repeat
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import accumulate, by_name, megatron, pipeline, recompute_layers, zero1, zero2, zero3
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import split
from jscaler.report.hlo import collectives as hlo_collectives
from jscaler.report.targets import described_devices
from models.mlp import MLP

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def clipped_update(loss_fn: Callable[[Any], jax.Array], state: Any) -> Any:
    loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
    updates, opt = CLIPPED.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


@made_once
def stacked() -> Any:
    """The GPT's layers in a scan, and computed again."""
    return gpt(layers=2, heads=8, stacked=True, remat=True)


def moved(plan: StepPlan) -> Counter[str]:
    """Collectives of more than a scalar, by kind."""
    return Counter(kind for kind, tensor in collectives(plan) if tensor.shape)


def held(plan: StepPlan, part: str) -> tuple[int, int]:
    """Bytes of a part of the state that a device holds, and of all of it."""
    layouts = {t: layout for t, layout in plan.completed.inputs.items() if t.name.startswith(f"state/{part}") and t.shape}
    return sum(math.prod(lay.local_shape) * t.itemsize for t, lay in layouts.items()), sum(t.nbytes for t in layouts)


def test_gradients_are_scattered_once_and_new_parameters_gathered_once() -> None:
    plan = planned(zero1(), mlp(CLIPPED), 8)
    assert moved(plan) == {"reduce_scatter": 8, "all_gather": 8}  # eight parameters; of the norms, scalars are all-reduced
    own, whole = held(plan, "opt")
    assert own == whole // 8
    assert held(plan, "params") == (whole // 2, whole // 2)


def test_parameters_in_parts_are_gathered_forward_and_backward() -> None:
    plan = planned(zero3(), mlp(CLIPPED), 8)
    # all eight forward; backward the kernels of all layers but the first, whose inputs need no gradient
    assert moved(plan) == {"reduce_scatter": 8, "all_gather": 8 + 3}
    own, whole = held(plan, "")
    assert own == whole // 8
    again = [op for op in plan.graph.ops if op.path.endswith("@refetch")]
    assert [op.anywhere for op in again] == ["fence"] * 3


def test_what_tensor_parallelism_cuts_is_cut_further() -> None:
    plan = planned(megatron(dp=2, tp=4, columns=COLUMNS, zero=3), mlp(), 8)
    layouts = {t.name.removeprefix("state/params/"): str(layout) for t, layout in plan.completed.inputs.items()}
    assert layouts["layer_0/kernel"].startswith("R1 V1 D(2,4)")
    assert layouts["layer_1/kernel"].startswith(
        "R1 V1 D(8,1) on [0 4 1 5 2 6 3 7]"
    )  # rows: by columns of the grid, then rows
    assert layouts["layer_1/bias"].startswith("R4 V1 D(2)")
    without = moved(planned(megatron(dp=2, tp=4, columns=COLUMNS), mlp(), 8))
    assert without["all_reduce"] - moved(plan)["all_reduce"] == moved(plan)["reduce_scatter"] == 8


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("plan", "make"),
    of_the_day(
        [
            (zero1(), mlp),
            (zero3(), mlp),
            (megatron(dp=2, tp=4, columns=COLUMNS, zero=1), mlp),
            (megatron(dp=2, tp=2, sequence=True, zero=3), stacked),
        ]
    ),
)
def test_the_numbers_are_those_of_one_device(plan: Any, make: Any) -> None:
    assert_same_numbers(plan, make, 4 if make is stacked else 8)


def test_of_a_stack_of_layers_one_is_whole_at_a_time() -> None:
    plan = planned(zero3(), stacked(), 8)
    loops = [task for task in plan.program.tasks if isinstance(task, Repeat)]
    assert len(loops) == 2
    for loop in loops:
        gathered = [t for t in loop.tasks if isinstance(t, Adapt) and t.adapter.steps[0].kind == "all_gather"]
        assert len([t for t in gathered if "params/blocks" in t.tensor.name]) == len(gathered) > 10
    outside = [t.tensor for t in plan.program.tasks if isinstance(t, Adapt)]
    assert not [t for t in outside if "blocks" in t.name and len(t.shape) > 1]
    scattered = {t.tensor for t in loops[1].tasks if isinstance(t, Adapt) and t.adapter.adds}
    assert len(scattered) == 16  # the gradients of a layer, in its own iteration
    for stack, layout in plan.completed.gradients.items():
        assert layout.cuts[0] == () if "blocks" in stack.name else True


def cast_stack_step(state: Any, batch: Any) -> Any:
    """Its layers are a stack that is made of the parameters before the loop."""

    def loss_fn(params: Any) -> jax.Array:
        kernels = 2 * params["kernel"].swapaxes(1, 2)
        return jnp.mean(jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), batch["x"], kernels)[0] ** 2)

    return clipped_update(loss_fn, state)


@made_once
def cast_stack() -> Any:
    draws = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(draws.normal(size=(4, 8, 8)))}
    arguments = {"params": params, "opt": CLIPPED.init(params)}, {"x": jnp.asarray(draws.normal(size=(16, 8)))}
    return cast_stack_step, arguments


def layered_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], params["kernel"])[0] ** 2)

    return clipped_update(loss_fn, state)


@made_once
def layered() -> Any:
    """Its layers are the stack of parameters itself."""
    return layered_step, cast_stack()[1]


@pytest.mark.parametrize("plan", [zero3(), megatron(dp=2, tp=2, columns={"*/kernel": 1}, vocab=False, zero=3)])
def test_a_stack_that_is_cast_before_its_loop_is_whole_one_layer_at_a_time(plan: Any) -> None:
    found = planned(plan, cast_stack(), 4)
    (kernel,) = (layout for t, layout in found.completed.inputs.items() if t.name == "state/params/kernel")
    assert not kernel.cuts[0], "layers are taken apart by the loop"
    outside = [task.tensor for task in found.program.tasks if isinstance(task, Adapt)]
    assert not [t for t in outside if len(t.shape) > 2]
    loops = [task for task in found.program.tasks if isinstance(task, Repeat)]
    made = [[t for t in loop.tasks if isinstance(t, Adapt) and t.tensor.shape == (8, 8)] for loop in loops]
    kinds = [[step.kind for t in adapts for step in t.adapter.steps] for adapts in made]
    assert kinds == [["all_gather"], ["all_gather", "reduce_scatter"]]
    assert_same_numbers(plan, cast_stack, 4)


@pytest.mark.one_day_in(2)
def test_the_first_stage_scatters_the_gradients_of_a_layer_in_its_own_iteration() -> None:
    """No device holds a whole stack of gradients: of GPT 1.3B that would be a quarter of the peak."""
    plan = planned(zero1(), stacked(), 8)
    loops = [task for task in plan.program.tasks if isinstance(task, Repeat)]
    inside = [[t for t in loop.tasks if isinstance(t, Adapt)] for loop in loops]
    assert not inside[0]
    assert len(inside[1]) == 16
    assert {tuple(step.kind for step in t.adapter.steps) for t in inside[1]} == {("reduce_scatter",)}
    assert not [t for t in plan.program.tasks if isinstance(t, Adapt) and t.adapter.adds and "blocks" in t.tensor.name]
    assert_same_numbers(zero1(), stacked, 8)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_stack_may_be_sharded_along_any_dim_also_by_whole_layers(dim: int, stored: bool) -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.shard(graph.input("state/params/kernel"), dim, devices, stored=stored)
        split(graph, devices, batch_factors(graph, "batch", devices.size))

    plan = planned(policy, layered(), 4)
    loops = [task for task in plan.program.tasks if isinstance(task, Repeat)]
    scattered = [t for t in loops[1].tasks if isinstance(t, Adapt) and t.adapter.adds]
    assert len(scattered) == (0 if dim == 0 else 1)  # whole layers lie apart: they are dealt out behind the loop
    assert held(plan, "opt")[0] == held(plan, "opt")[1] // 4
    assert_same_numbers(policy, layered, 4)


def dtype_of(exchange: Any) -> str:
    """What an exchange moves."""
    return exchange.input.aval.dtype.name


def test_what_is_cast_is_gathered_after_the_cast() -> None:
    plan = planned(zero3(), gpt(dtype=jnp.bfloat16), 8)
    gathers = [
        e for e in plan.flat.exchanges if isinstance(e.adapt, Adapt) and e.adapt.adapter.steps[0].kind == "all_gather"
    ]
    wide = {e.adapt.tensor.name.split("@")[0] for e in gathers if dtype_of(e) == "float32"}
    assert {name.split("/")[-2].rstrip("12") for name in wide} == {"norm"}  # which computes in float32
    sums = [e for e in plan.flat.exchanges if isinstance(e.adapt, Adapt) and e.adapt.adapter.adds and e.adapt.tensor.shape]
    assert {dtype_of(e) for e in sums} == {"float32"}
    narrow = planned(zero3(reduce_dtype="bfloat16"), gpt(dtype=jnp.bfloat16), 8)
    assert {a.reduce_dtype for a in narrow.program.adapters if a.adapter.adds and a.tensor.shape} == {"bfloat16"}


def uneven_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["kernel"] + params["bias"]) ** 2) * params["scale"]

    return clipped_update(loss_fn, state)


@pytest.mark.smoke
@pytest.mark.parametrize("plan", ["zero3", "megatron(dp=2, tp=2, vocab=False, zero=3, columns={'*/w': 1})"])
def test_frozen_layers_lie_in_parts_too(plan: str) -> None:
    """An adapter of low rank is trained beside a kernel that is not, and comes back in the state as it came."""

    def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss_fn(low: dict[str, jax.Array]) -> jax.Array:
            kernel = state["base"]["w"] + low["a"] @ low["b"]
            return ((jnp.tanh(batch @ kernel) @ state["base"]["out"]) ** 2).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["low"])
        return {**state, "low": jax.tree.map(lambda p, g: p - g, state["low"], grads)}, loss

    shapes = {"base": {"w": (8, 32), "out": (32, 8)}, "low": {"a": (8, 4), "b": (4, 32)}}
    draw = np.random.default_rng(0).normal
    with jax.enable_x64(True):
        state = jax.tree.map(lambda shape: draw(size=shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
        batch = draw(size=(8, 8))
        ours, theirs = jscaler.parallelize(plan, devices=4)(step), jax.jit(step)
        mine, wanted = state, state
        for _ in range(2):
            mine, loss = ours(mine, batch)
            wanted, right = theirs(wanted, batch)
            np.testing.assert_allclose(loss, right, rtol=1e-12)
        for made, other in zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(made, other, rtol=1e-12, atol=1e-14)
        assert {x.addressable_shards[0].data.size for x in mine["base"].values()} == {8 * 32 // 4}


PENALTY = 1e-2


def penalised_step(state: Any, batch: Any) -> Any:
    """An MLP whose loss has a penalty on its kernels, which every device knows whole."""

    def loss_fn(params: Any) -> jax.Array:
        h = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
        penalty = PENALTY * sum(jnp.sum(p**2) for p in params.values())
        return jnp.mean((h @ params["down"]) ** 2) + penalty

    return clipped_update(loss_fn, state)


@made_once
def penalised() -> Any:
    draws = np.random.default_rng(0)
    shapes = {"up": (8, 16), "bias": (16,), "down": (16, 8)}
    params = {name: jnp.asarray(draws.normal(size=shape)) for name, shape in shapes.items()}
    arguments = {"params": params, "opt": CLIPPED.init(params)}, {"x": jnp.asarray(draws.normal(size=(8, 8)))}
    return penalised_step, arguments


COLUMN = {"*/up": 1}
WITH_TENSORS = {stage: megatron(dp=2, tp=2, columns=COLUMN, vocab=False, zero=stage) for stage in (1, 3)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("plan", "devices"), [(zero1(), 4), (zero3(), 4), (WITH_TENSORS[1], 4)])
def test_a_gradient_with_a_whole_summand_is_scattered_too(plan: Any, devices: int) -> None:
    found = planned(plan, penalised(), devices)
    shapes = {t.shape for t in found.graph.inputs if t.name.startswith("state/params")}
    reduced = [t for kind, t in collectives(found) if kind == "all_reduce" and t.shape in shapes]
    assert (reduced, moved(found)["reduce_scatter"]) == ([], 3)
    assert_same_numbers(plan, penalised, devices)


@made_once
def factored() -> Any:
    return mlp(optax.adafactor(1e-2, min_dim_size_to_factor=8))


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", of_the_day([zero1(), zero3(), megatron(dp=2, tp=4, columns=COLUMNS, zero=1)], 2))
def test_factored_moments_bring_vectors_together(plan: Any) -> None:
    """The means over a dim that is cut are summed; gradients, and what updates make of them, stay in parts."""
    found = planned(plan, factored(), 8)
    assert moved(found)["reduce_scatter"] == 8
    sums = [t for kind, t in collectives(found) if kind == "all_reduce" and found.graph.producer[t].kind == "update"]
    assert {len(t.shape) for t in sums} == {0, 1}
    kernels = [t for t in found.completed.gradients if len(t.shape) == 2]
    assert len(kernels) == 4
    cut = [op for op in found.graph.ops if op.kind == "update" for t in op.inputs if t in kernels]
    assert all(found.completed.ops[op.path].placement.factors for op in cut)
    assert_same_numbers(plan, factored, 8)


@pytest.mark.parametrize("plan", [zero1(), zero3(), megatron(dp=3, zero=1, columns=COLUMNS, vocab=False)])
def test_where_nothing_divides_a_warning_says_so(plan: Any) -> None:
    with pytest.warns(PlanWarning, match=r"no dim of the 8 parameters \(\d+ bytes\) divides by 3"):
        planned(plan, mlp(CLIPPED), 3)


@pytest.mark.parametrize(("plan", "leaves"), [(zero1(), 3), (zero3(), 3)])
def test_what_does_not_divide_is_listed(plan: Any, leaves: int) -> None:
    params = {"kernel": jnp.ones((16, 7)), "bias": jnp.zeros(7), "scale": jnp.ones(())}
    arguments = {"params": params, "opt": CLIPPED.init(params)}, {"x": jnp.ones((8, 16))}
    text = planned(plan, (uneven_step, arguments), 4).explain()
    assert f"replicated over the 4 devices that shards are split over: {leaves} leaves and 4 scalars" in text
    assert "└ state/params/bias f32[7], 28 bytes: nothing divides" in text
    assert "kernel f32" not in text.partition("replicated over")[2]


def test_decisions_are_part_of_the_plan() -> None:
    plans = [planned(plan, mlp(), 8).plan for plan in (zero1(), zero3(), zero1())]
    assert plans[0].digest == plans[2].digest != plans[1].digest
    assert "shard     state/params/layer_0/kernel dim 0 in 8 over [0 1 2 3 4 5 6 7], stored so" in str(plans[1])
    assert planned(plans[1], mlp(), 8).program.inputs == planned(zero3(), mlp(), 8).program.inputs  # a finished plan
    assert by_name('zero3(batch="batch")').__name__ == "zero3"
    assert by_name("megatron(dp=2, tp=4, zero=1)").__name__ == "megatron"


def test_mistakes() -> None:
    with pytest.raises(PlanError, match="zero is 0, 1, 2 or 3, not 4"):
        megatron(zero=4)  # type: ignore[arg-type]
    for leaf, dim, shape, error, message in (
        ("batch/x", 0, (8,), PlanError, "'batch/x' is no parameter"),
        ("state/params/layer_0/bias", 1, (8,), PlanError, r"of shape \(16,\) has no dim 1"),
        ("state/params/layer_0/bias", 0, (4,), PlanError, "give an array of all 8"),
        ("state/params/layer_0/kernel", 1, (8,), SplitError, "size 12 into 8"),
    ):
        made = mlp() if error is PlanError else narrow_mlp()

        def policy(graph: Any, devices: np.ndarray, leaf: str = leaf, dim: int = dim, shape: Any = shape) -> None:
            graph.shard(leaf, dim, devices[: shape[0]])

        with pytest.raises(error, match=message):
            planned(policy, made, 8)

    def twice(graph: Any, devices: np.ndarray) -> None:
        for _ in range(2):
            graph.shard("state/params/layer_0/bias", 0, devices)

    with pytest.raises(PlanError, match="was sharded before"):
        planned(twice, mlp(), 8)


@made_once
def narrow_mlp() -> Any:
    x = np.ones((8, 8), np.float32)
    model = MLP(hidden=12, layers=2, out=8, param_dtype=jnp.zeros(()).dtype)
    return with_arguments(model, CLIPPED, {"x": x, "labels": np.zeros(8, np.int32)}, x)


def test_a_cut_joins_the_shares_along_it() -> None:
    plan = planned(zero1(), mlp(), 8)
    for gradient, layout in plan.completed.gradients.items():
        assert not layout.values, gradient
        assert dataclasses.replace(layout, cuts=((),) * len(layout.cuts)).free == plan.completed.groups[0].names


COPIES = {"zero1": zero1(dp=2), "zero3": zero3(dp=2), "accumulated": accumulate(2, zero3(dp=2))}
ROWS = frozenset([(0, 1, 2, 3), (4, 5, 6, 7)])  # a copy of the state each
PARTS = frozenset([(0, 4), (1, 5), (2, 6), (3, 7)])  # the same part of both


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_state_lie_in_parts_each(name: str) -> None:
    """Of kernels so large that a second collective costs less than the bytes that it saves."""
    x = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
    made = with_arguments(MLP(hidden=256, layers=2, out=128), TX, {"x": x, "labels": np.arange(16)}, x)
    step, (state, batch) = made
    run = jscaler.parallelize(COPIES[name], devices=8)(step).lower(state, batch).compile()
    sent: Counter[tuple[str, Any]] = Counter()
    for found in hlo_collectives(run.as_text()):
        if found.nbytes > 4096:  # biases, norms and the loss are added over all devices at once
            sent[found.kind, frozenset(found.groups)] += round(found.sent * found.times)
    kernels, times = 2 * 4 * 128 * 256, 2 if name == "accumulated" else 1
    fetched = sent.pop(("all-gather", ROWS)) / (times * kernels * 3 // 4)
    assert fetched in ((1,) if name == "zero1" else (1, 1.5))  # one of both again for the backward, unless XLA merges these
    assert sent == {
        ("reduce-scatter", ROWS): times * kernels * 3 // 4,
        # of sums over micro-batches once, where biases lie in parts as well
        ("all-reduce", PARTS): kernels // 4 + (4 * (256 + 128) // 4 if name == "accumulated" else 0),
    }
    after = run(state, batch)[0]
    for part in ("opt", "params"):
        for leaf in (leaf for leaf in jax.tree.leaves(after[part]) if leaf.ndim == 2):
            held = [(shard.index, shard.data.size) for shard in leaf.addressable_shards]
            assert held[:4] == held[4:], "one copy lies as the other"
            parts = 1 if (name, part) == ("zero1", "params") else 4
            assert len(set(map(str, held))) == parts
            assert {size for _, size in held} == {128 * 256 // parts}


@made_once
def layers() -> Any:
    return gpt(layers=2)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("plan", "make"),
    of_the_day(
        [
            (zero1(dp=4), mlp),
            (zero3(dp=2), stacked),
            (accumulate(2, zero2(dp=2)), stacked),
            (accumulate(2, zero3(dp=2, gather_once=True)), mlp),
            (pipeline(2, 2, plan=zero3(dp=2)), layers),
            (recompute_layers(zero3(dp=2)), layers),
        ]
    ),
)
def test_the_numbers_with_copies_are_those_of_one_device(plan: Any, make: Any) -> None:
    assert_same_numbers(plan, make, 4 if make is mlp or plan.__name__ == "accumulate" else 8)


def test_how_many_copies() -> None:
    digests = [planned(plan, mlp(), 8).digest for plan in (zero3(), zero3(dp=1), by_name("zero3(dp=2)"), zero3(dp=2))]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert planned(zero3(dp=8), mlp(), 8).plan.shards == {}
    own, whole = held(planned(zero1(dp=4), mlp(CLIPPED), 8), "opt")
    assert own == whole // 2
    with pytest.raises(PlanError, match="zero2: dp=3 is a grid of 3 devices, and 8 are given; legal: 1, 2, 4, 8"):
        planned(zero2(dp=3), mlp(), 8)
    with pytest.raises(PlanError, match="zero3: dp is a positive whole number, not 0"):
        planned(zero3(dp=0), mlp(), 8)


@pytest.mark.aot
def test_temporaries_of_a_stack_are_less_than_its_parameters() -> None:
    sizes: dict[str, Any] = {"hidden": 128, "layers": 12, "heads": 8, "sequence": 16, "stacked": True, "remat": True}
    step, (state, batch) = gpt(optax.adam(1e-3), **sizes)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    devices = described_devices("8xH100-80GB")
    peaks = {}
    for plan in (zero1(), zero3()):
        lowered = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(step).lower(state, batch)
        memory = lowered.compile().memory_analysis()
        peaks[plan.__name__] = memory.temp_size_in_bytes
    assert peaks["zero3"] < parameters / 3 < peaks["zero1"] < parameters, (peaks, parameters)
