"""What `bench.parity` compares of updates: optimizers and master weights, on one small model, under every plan.

An update follows its parameter: its state lies in the parameter's layout, and nothing of a parameter's size is moved for
it but gradients (`strays` lists what is). Some optimizers meet a gradient that is not finite in step `BAD`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler
from jscaler.lower.program import Adapt, Compute, walk
from jscaler.lower.step_plan import StepPlan
from models.master import make_master_state, master_step
from models.mlp import MLP

NAME = "mlp, updates"
STEPS, BAD = 5, 2
RATE = 1e-2
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 8)
Optimizer = Callable[[], Any]


def clipped(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), inner)


def kernels(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def groups(params: Any) -> Any:
    """Two groups: biases and kernels."""
    return jax.tree.map(lambda p: "kernel" if p.ndim > 1 else "bias", params)


OPTIMIZERS: dict[str, Optimizer] = {
    "clip+adamw": lambda: clipped(optax.adamw(RATE)),
    "two groups": lambda: optax.multi_transform(
        {"kernel": clipped(optax.adamw(RATE)), "bias": optax.sgd(RATE, momentum=0.9)}, groups
    ),
    "lamb": lambda: optax.lamb(RATE),
    "apply_if_finite(clip+adamw)": lambda: optax.apply_if_finite(clipped(optax.adamw(RATE)), 3),
    "MultiSteps(clip+adamw, 2)": lambda: optax.MultiSteps(clipped(optax.adamw(RATE)), 2),
    "apply_if_finite(MultiSteps(lamb, 2))": lambda: optax.apply_if_finite(
        optax.MultiSteps(optax.lamb(RATE), 2).gradient_transformation(), 3
    ),
    "MultiSteps(adam, 2), skipping what is not finite": lambda: optax.MultiSteps(
        optax.adam(RATE), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(RATE),
    "masked decay, schedule, ema": lambda: optax.chain(
        optax.scale_by_adam(),
        optax.masked(optax.add_decayed_weights(0.1), kernels),
        optax.scale_by_learning_rate(SCHEDULE),
        optax.ema(0.9),
    ),
    "inject_hyperparams(rmsprop)": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=SCHEDULE, momentum=0.9),
    "novograd": lambda: optax.novograd(RATE),
    "lookahead": lambda: optax.lookahead(clipped(optax.adam(RATE)), sync_period=2, slow_step_size=0.5),
}
MEETS_BAD = frozenset(name for name in OPTIMIZERS if "finite" in name)

FIRST = '{"*/layer_0/kernel": 1}'
PLANS: dict[str, int] = {
    "single": 1,
    "data_parallel": 4,
    f"tensor_parallel({FIRST})": 4,
    f'sequence_parallel({FIRST}, {{"batch/x": 0}})': 4,
    'vocab_parallel({"*/layer_2/kernel": 1})': 8,
    f"megatron(dp=2, tp=4, columns={FIRST})": 8,
    f'megatron(dp=2, tp=4, columns={FIRST}, sequence={{"batch/x": 0}})': 8,
}
# Updates in parts of parameters that lie whole (1), or in parts too (3)
ZERO: dict[str, int] = {
    "zero1": 4,
    "zero3": 4,
    "accumulate(2, zero2())": 4,
    f"megatron(dp=2, tp=2, columns={FIRST}, zero=1)": 4,
}
# Updates behind micro-batches, whose gradients are added up in float32
SUMS = 'accumulate_dtype="float32"'
TIME: dict[str, int] = {
    f"accumulate(4, {SUMS})": 1,
    f"accumulate(2, data_parallel(), {SUMS})": 4,
    f"accumulate(2, zero2(), {SUMS})": 4,
    f"accumulate(2, megatron(dp=2, tp=2, columns={FIRST}, zero=1), {SUMS})": 4,
}


@dataclass(frozen=True)
class Made:
    """A step, its first state, and its batches."""

    step: Callable[..., Any]
    state: Any
    batches: list[Any]


def update_step(name: str, value_and_grad: Any = jscaler.value_and_grad, dtype: Any = None) -> Made:
    """A step of a small MLP with the optimizer ``name``; every leaf of its state is trained on from the first step."""
    dtype = jnp.zeros(()).dtype if dtype is None else dtype
    model = MLP(hidden=32, layers=3, out=8, dtype=dtype, param_dtype=dtype)
    draws = np.random.default_rng(0)
    scales = [np.inf if i == BAD and name in MEETS_BAD else 1.0 for i in range(STEPS)]
    batches = [
        {"x": draws.normal(size=(16, 12)).astype(dtype), "y": draws.integers(0, 8, 16), "scale": np.asarray(s, dtype)}
        for s in scales
    ]
    shapes = jax.eval_shape(model.init, jax.random.key(0), batches[0]["x"])["params"]
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3, p.dtype), shapes)
    optimizer = OPTIMIZERS[name]()
    slow = name == "lookahead"
    held = optax.LookaheadParams.init_synced(params) if slow else params

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            logits = jnp.asarray(model.apply({"params": p}, batch["x"]))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean() * batch["scale"]

        params = state["params"]
        value, gradients = value_and_grad(loss)(params.fast if slow else params)
        updates, moments = optimizer.update(gradients, state["opt"], params)
        return {"params": optax.apply_updates(params, updates), "opt": moments}, value

    return Made(step, {"params": held, "opt": optimizer.init(held)}, batches)


def off_layout(state: Any) -> list[str]:
    """The leaves of optimizer state that look like a parameter (the end of their path, and shape) and lie otherwise."""
    params = {_path(path): leaf for path, leaf in jax.tree.leaves_with_path(state["params"])}
    found = []
    for path, leaf in jax.tree.leaves_with_path(state["opt"]):
        twin = next((p for name, p in params.items() if _path(path).endswith(name) and p.shape == leaf.shape), None)
        if twin is not None and not leaf.sharding.is_equivalent_to(twin.sharding, leaf.ndim):
            found.append(f"{_path(path)}: {leaf.sharding.spec}, parameter {twin.sharding.spec}")
    return found


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path[-2:])


def strays(plan: StepPlan) -> dict[str, float]:
    """What updates move beside gradients: tensor -> bytes that a device sends, of all that is as large as a parameter."""
    kept = {e.adapt.output for e in plan.flat.exchanges}  # equal ones are made once
    shapes = {t.shape for call in plan.graph.calls for t in call.wrt if len(t.shape) > 1}
    found: dict[str, float] = {}
    moved: list[tuple[Adapt, int]] = []
    for task, times in walk(plan.program.tasks):
        if isinstance(task, Adapt):
            moved += [(task, times)] if task.output in kept else []
        elif isinstance(task, Compute):
            if task.op.kind == "update":
                found.update(_beside_gradients(moved, shapes))
            moved = []
    return {**found, **dict(_beside_gradients(moved, shapes))}


def _beside_gradients(moved: list[tuple[Adapt, int]], shapes: set[tuple[int, ...]]) -> Iterator[tuple[str, float]]:
    for adapt, times in moved:
        kinds = {step.kind for step in adapt.adapter.steps} - {"slice", "value_mask"}
        joins = adapt.tensor.role == "gradient" and kinds <= {"all_reduce", "reduce_scatter"}
        sent = sum(nbytes for _, nbytes in adapt.sent(adapt.tensor.itemsize)) * times
        if sent and not joins and adapt.tensor.shape in shapes:
            yield adapt.tensor.name, sent


def far(state: Any, want: Any, allowed: float = 1e-10) -> list[str]:
    """The leaves that differ by more than ``allowed`` times their largest element or the learning rate, or in type."""
    return [path for path, distance in distances(state, want).items() if not distance <= allowed]


def distances(state: Any, want: Any) -> dict[str, float]:
    """Per leaf the largest difference, against its largest element and the learning rate; infinite where types differ."""
    found = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(want), strict=True):
        same = (a.shape, a.dtype) == (b.shape, b.dtype)
        mine, theirs = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = max(float(np.abs(theirs).max(initial=0.0)), RATE)
        found[jax.tree_util.keystr(path)] = float(np.abs(mine - theirs).max(initial=0.0)) / largest if same else np.inf
    return found


def parts_of(state: Any) -> Mapping[str, tuple[int, int]]:
    """Per leaf its bytes, and those that the first device holds."""
    return {
        jax.tree_util.keystr(path): (leaf.nbytes, leaf.addressable_shards[0].data.nbytes)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def run(made: Made, decorate: Callable[..., Any]) -> Any:
    """The state after all steps."""
    decorated, state = decorate(made.step), made.state
    for batch in made.batches:
        state, _ = decorated(state, batch)
    return state


FLOOR, BOUND = 1e-12, 1.5
QUICK = ("apply_if_finite(MultiSteps(lamb, 2))",)
MASTERS = {(of, kind): dtype for of in ("cast", "master") for kind, dtype in (("bf16", jnp.bfloat16), ("f16", jnp.float16))}


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Float64: per optimizer and plan the distance from one device, what lies off its parameter, and what strays."""
    for name in QUICK if quick else OPTIMIZERS:
        want = run(update_step(name, jax.value_and_grad), jax.jit)
        for plan, devices in list(PLANS.items())[-1:] if quick else {**PLANS, **ZERO}.items():
            made = update_step(name)
            decorated = jscaler.parallelize(plan, devices=devices)
            lowered = decorated(made.step).lower(made.state, made.batches[0])
            state = run(made, lambda _, lowered=lowered: lowered.compile())
            where = {"model": NAME, "plan": plan, "dtype": "float64", "devices": devices}
            far_off = max(distances(state, want).values())
            yield {**where, "measure": f"{name}: state, per leaf", "value": far_off, "bound": 1e-10}
            moved, stored_whole = strays(lowered.plan), plan in ZERO and plan != "zero3"
            if stored_whole:  # the next parameters are put together, once
                moved = {tensor: nbytes for tensor, nbytes in moved.items() if not tensor.startswith("update/")}
            else:
                row = {**where, "measure": f"{name}: leaves of state that do not lie like their parameter"}
                yield {**row, "value": len(off_layout(state)), "bound": 0}
            row = {**where, "measure": f"{name}: bytes moved beside gradients and vectors", "value": sum(moved.values())}
            yield {**row, "bound": 0}
    yield from [] if quick else master_rows()


def master_rows() -> Iterator[dict[str, Any]]:
    """Master weights: the distance of parameters and moments from a run in float64, against that of ``jax.jit``."""
    exact = run(master_made("master", jnp.float64, jax.value_and_grad), jax.jit)
    for (of, kind), dtype in MASTERS.items():
        jit = run(master_made(of, dtype, jax.value_and_grad), jax.jit)
        for plan, devices in {**PLANS, **ZERO, **TIME}.items():
            ours = run(master_made(of, dtype), jscaler.parallelize(plan, devices=devices))
            value = (_away(ours, exact) + FLOOR) / (_away(jit, exact) + FLOOR)
            measure = f"gradients of the {of}, f32 master: state, L2 to float64 / jit's"
            where = {"model": NAME, "plan": plan, "dtype": kind, "devices": devices}
            yield {**where, "measure": measure, "value": value, "bound": BOUND}


def master_made(of: Any, dtype: Any, value_and_grad: Any = jscaler.value_and_grad) -> Made:
    """`models.master.master_step` on the small MLP, its master in float64 where the loss is."""
    made = update_step("clip+adamw", dtype=dtype)
    model = MLP(hidden=32, layers=3, out=8)
    scale = 1024.0 if dtype == jnp.float16 else None
    state = make_master_state(model, made.batches[0]["x"].astype(np.float32), clipped(optax.adamw(RATE)), scale)
    if dtype == jnp.float64:
        wide = jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, (state.params, state.opt_state)
        )
        state = state.replace(params=wide[0], opt_state=wide[1])
    batches = [{"x": batch["x"], "labels": batch["y"]} for batch in made.batches]
    return Made(functools.partial(master_step, dtype=dtype, of=of, value_and_grad=value_and_grad), state, batches)


def _away(state: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(exact.params), strict=True)
    return float(np.sqrt(sum(((np.asarray(a, np.float64) - np.asarray(b)) ** 2).sum() for a, b in pairs)))
