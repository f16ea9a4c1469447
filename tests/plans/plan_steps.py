"""Train steps of the plans' tests: a small GPT and an MLP, and the checks that every plan is held to."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend import core

import jscaler
from jscaler.lower.flat_program import FlatLoop
from jscaler.lower.program import Adapt
from jscaler.lower.step_plan import StepPlan
from jscaler.report.explained import ExplainedPlan
from jscaler.stages import Captured, lower, transform
from models.gpt import GPT, GPTConfig
from models.gpt_nnx import GPT as NnxGPT
from models.mlp import MLP

COLUMNS = {"*/layer_0/kernel": 1, "*/layer_2/kernel": 1}  # of the MLP
TX = optax.sgd(0.1, momentum=0.9)  # hides nothing: a gradient twice too large moves twice too far

Step = Callable[..., Any]
CAPTURED: dict[Step, Captured] = {}  # a step is traced once, for all plans


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, called once for its arguments and the precision that is set."""
    cached = functools.cache(lambda _, *args, **options: make(*args, **options))
    return functools.wraps(make)(lambda *args, **options: cached(jnp.zeros(()).dtype, *args, **options))


def train_step(model: nn.Module, tx: optax.GradientTransformation = TX) -> Step:
    """A step on ``batch`` of ``x`` (or tokens) and labels."""
    training = "train" in inspect.signature(type(model).__call__).parameters
    options: dict[str, Any] = {"train": True, "rngs": {"dropout": jax.random.key(7)}} if training else {}

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            data = batch["x"] if "x" in batch else batch["tokens"]
            logits = jnp.asarray(model.apply({"params": params}, data, **options))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


@made_once
def gpt(tx: optax.GradientTransformation = TX, **changes: Any) -> tuple[Step, tuple[Any, Any]]:
    """A GPT of one layer, and its arguments in float64 where that is enabled."""
    sizes = {"hidden": 16, "layers": 1, "heads": 4, "sequence": 8, "vocabulary": 32, **changes}
    model = GPT(GPTConfig(**sizes, param_dtype=jnp.zeros(()).dtype))
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9), np.int32)
    return with_arguments(model, tx, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, tokens[:1, :-1])


@made_once
def gpt_nnx() -> tuple[Step, tuple[Any, Any]]:
    """The same GPT in nnx."""
    config = GPTConfig(hidden=16, layers=1, heads=4, sequence=8, vocabulary=32, param_dtype=jnp.zeros(()).dtype)
    graphdef, params, rest = nnx.split(NnxGPT(config, nnx.Rngs(0)), nnx.Param, ...)

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params, state["rest"], copy=True)(batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss

    return step, ({"params": params, "rest": rest}, gpt()[1][1])


@made_once
def mlp(tx: optax.GradientTransformation = TX, layers: int = 4) -> tuple[Step, tuple[Any, Any]]:
    """An MLP."""
    draws = np.random.default_rng(0)
    x = np.asarray(draws.normal(size=(24, 8)), jnp.zeros(()).dtype)
    model = MLP(hidden=16, layers=layers, out=8, param_dtype=jnp.zeros(()).dtype)
    return with_arguments(model, tx, {"x": x, "labels": draws.integers(0, 8, 24)}, x)


def with_arguments(model: nn.Module, tx: optax.GradientTransformation, batch: Any, example: Any) -> Any:
    """The step of a model, and its arguments; ``example`` is what it is initialised with."""
    params = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), example)["params"]
    draws = np.random.default_rng(1)
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.5, p.dtype), params)
    return train_step(model, tx), ({"params": params, "opt": tx.init(params)}, batch)


def captured_once(step: Step, *arguments: Any) -> Captured:
    """The step's graph, whatever the plan."""
    if step not in CAPTURED:
        CAPTURED[step] = Captured.of(jscaler.parallelize("single", devices=1)(step).graph(*arguments))
    return CAPTURED[step]


def planned(plan: Any, made: tuple[Step, tuple[Any, Any]], devices: int) -> StepPlan:
    """The step under ``plan``, not compiled; its redistribution is proven."""
    step, arguments = made
    known = captured_once(step, *arguments)
    done = ExplainedPlan.of(lower(known, transform(known, plan, devices)))
    jscaler.verify(done)
    return done


def activations(plan: StepPlan) -> Counter[str]:
    """Kinds of the collectives that move activations or their gradients, scalars and parameters' gradients left out."""
    parameters = {t.shape for t in plan.graph.inputs if t.name.startswith("state/")}
    real = [(k, t) for k, t in collectives(plan) if jnp.issubdtype(t.dtype, jnp.floating)]
    return Counter(kind for kind, t in real if t.shape and t.shape not in parameters)


def collectives(plan: StepPlan) -> list[tuple[str, Any]]:
    """Kind and tensor of every collective; equal ones are made once."""
    return [
        (step.kind, adapt.tensor)
        for adapt in (e.adapt for e in plan.flat.exchanges if isinstance(e.adapt, Adapt))
        for step in adapt.adapter.steps
        if step.kind not in ("slice", "value_mask")
    ]


@functools.cache
def reference(make: Callable[..., Any]) -> tuple[Any, list[float]]:
    """State and losses after three steps of ``jax.jit`` in float64."""
    step, (state, batch) = make()
    run, losses = jax.jit(step).lower(state, batch).compile(), []
    for _ in range(3):
        state, loss = run(state, batch)
        losses.append(float(loss))
    return _real_leaves(state), losses


def assert_same_numbers(plan: Any, make: Callable[..., Any], devices: int) -> None:
    """Three optimizer steps in float64 under ``plan`` equal those of ``jax.jit``, leaf by leaf."""
    with jax.enable_x64(True):
        expected, losses = reference(make)
        step, (state, batch) = make()
        lowered = jscaler.parallelize(plan, devices=devices)(step).lower(state, batch)
        run = lowered.compile()
        for want in losses:
            state, loss = run(state, batch)
            assert abs(float(loss) - want) < 1e-10
        for (path, leaf), (_, want) in zip(_real_leaves(state), expected, strict=True):
            assert leaf.dtype == want.dtype
            allowed = 1e-10 * max(np.abs(want).max(), 0.1)
            assert np.abs(leaf - want).max() <= allowed, path


def _real_leaves(state: Any) -> list[tuple[str, np.ndarray]]:
    """The leaves by path, keys and counters left out."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state)]
    return [(path, np.asarray(leaf)) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def repeated(plan: StepPlan) -> Counter[str]:
    """How often each primitive and each collective runs, over all iterations of loops."""
    found: Counter[str] = Counter()

    def add(items: Any, times: int) -> None:
        for item in items:
            if isinstance(item, core.JaxprEqn):
                found[item.primitive.name] += times
            elif isinstance(item, FlatLoop):
                add(item.items, times * item.loop.length)
            elif isinstance(item.adapt, Adapt):
                for move in item.adapt.adapter.steps:
                    found[move.kind] += times

    add(plan.flat.items, 1)
    return found
