"""Does every plan give one device's numbers? Design, section 4: float64 to rounding; float32 and bfloat16 no further
from the float64 run than 1.5 times ``jax.jit`` itself; step-1 gradients per leaf against the global norm.

Five steps with clipping and AdamW, and five with momentum SGD and no clipping, which would hide a gradient that is n
times too large. Dropout is on; all runs draw the same masks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler
from bench.harness import Row, main

COLUMNS = ("model", "plan", "dtype", "devices", "measure", "value", "bound")
LEARNING_RATE = 1e-2
STEPS = 5
# The bias of the keys in softmax attention has a true gradient of 0; what is computed is rounding. Adam divides it by
# its epsilon, so such leaves may differ by that many learning rates, and are held to that instead.
ROUNDING, ADAM_EPS = 1e-14, 1e-8
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip+adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE)),
    "momentum": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
}
DTYPES = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model's loss on a batch: ``loss(params, batch, key)``, its parameters in float64, and its batches."""

    loss: Callable[[Any, Any, jax.Array], jax.Array]
    params: Any
    batches: list[Any]


def gpt_case(dtype: Any) -> Case:
    from models.gpt import GPT, GPTConfig
    from models.text import batch_at, load_bytes

    compute = jnp.bfloat16 if dtype == jnp.bfloat16 else dtype
    stored = jnp.float32 if dtype == jnp.bfloat16 else dtype  # bfloat16 computes, float32 remembers
    model = GPT(GPTConfig(hidden=32, layers=2, heads=4, sequence=16, dtype=compute, param_dtype=stored))
    text = load_bytes()
    batches = [batch_at(text, i, 8, 16) for i in range(STEPS)]
    params = GPT(GPTConfig(hidden=32, layers=2, heads=4, sequence=16)).init(jax.random.key(0), batches[0]["tokens"])[
        "params"
    ]

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), batch["labels"]).mean()

    return Case(loss, jax.tree.map(lambda p: p.astype(stored), params), batches)


def mlp_case(dtype: Any) -> Case:
    from models.mlp import MLP

    compute = jnp.bfloat16 if dtype == jnp.bfloat16 else dtype
    stored = jnp.float32 if dtype == jnp.bfloat16 else dtype
    model = MLP(hidden=32, layers=3, out=8, dropout=0.2, dtype=compute, param_dtype=stored)
    draws = np.random.default_rng(0)
    batches = [{"x": draws.normal(size=(16, 12)), "y": draws.integers(0, 8, 16)} for _ in range(STEPS)]
    params = MLP(hidden=32, layers=3, out=8).init(jax.random.key(0), jnp.zeros((1, 12), jnp.float32))["params"]

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch["x"].astype(stored), train=True, rngs={"dropout": key})
        wide = jnp.asarray(logits).astype(jnp.promote_types(compute, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(wide, batch["y"]).mean()

    return Case(loss, jax.tree.map(lambda p: p.astype(stored), params), batches)


def one_mlp(graph: Any, devices: np.ndarray) -> None:
    """Hidden units of the first two layers over the devices, everything else copied."""
    for layer, dim in (("layer_0", 1), ("layer_1", 0)):
        op = graph[f"{layer}/dot"]
        graph.op_assign(graph.op_trans(op, jscaler.Split((f"{layer}/kernel", dim), devices.size)), devices)


DOCS = Path(__file__).parent.parent / "docs"
CASES = {"mlp": mlp_case, "gpt": gpt_case}
PLANS: dict[str, list[tuple[str, Any, int]]] = {
    "mlp": [("single", "single", 1), ("data_parallel", "data_parallel", 8), ("one_mlp", one_mlp, 4)],
    "gpt": [
        ("single", "single", 1),
        ("split_one_mlp", f"{DOCS / 'split_one_mlp.py'}:split_one_mlp", 4),
        ("data_parallel", "data_parallel", 2),
        ("data_parallel", "data_parallel", 8),
    ],
}


def run(case: Case, optimizer: optax.GradientTransformation, decorate: Callable[..., Any], vg: Any) -> tuple[Any, Any]:
    """Parameters after five steps, and the gradients of the first."""

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, moments = state
        loss, gradients = vg(lambda p: case.loss(p, batch, key))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss, gradients

    decorated = decorate(step)
    state = (case.params, optimizer.init(case.params))
    first = None
    for i, batch in enumerate(case.batches):
        state, _, gradients = decorated(state, batch, jax.random.key(100 + i))
        first = gradients if first is None else first
    return _float64(state[0]), _float64(first)


def _float64(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def _distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True))))


def _norm(a: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in a)))


def measures(dtype: str, ours: tuple[Any, Any], jit: tuple[Any, Any], exact: tuple[Any, Any]) -> Iterator[Row]:
    """The rows of one run; ``exact`` is the float64 run of ``jax.jit``."""
    (params, gradients), (jit_params, jit_gradients) = ours, jit
    if dtype == "float64":
        largest = max(np.abs(g).max() for g in jit_gradients)
        leaves = list(zip(params, jit_params, jit_gradients, strict=True))
        real = [(a, b) for a, b, g in leaves if np.abs(g).max() > ROUNDING * largest]
        worst = max(np.abs(a - b).max() / max(np.abs(b).max(), LEARNING_RATE) for a, b in real)
        yield {"measure": "parameters, per leaf", "value": float(worst), "bound": 1e-10}
        rest = [np.abs(a - b).max() / LEARNING_RATE for a, b, g in leaves if np.abs(g).max() <= ROUNDING * largest]
        if rest:
            name = f"{len(rest)} leaves with a true gradient of 0"
            yield {"measure": name, "value": float(max(rest)), "bound": STEPS * ROUNDING / ADAM_EPS}
    else:
        floor = 1e-12
        for what, mine, theirs, true in (
            ("parameters", params, jit_params, exact[0]),
            ("gradients", gradients, jit_gradients, exact[1]),
        ):
            ratio = (_distance(mine, true) + floor) / (_distance(theirs, true) + floor)
            yield {"measure": f"{what}, L2 to float64 / jit's", "value": ratio, "bound": 1.5}
    if dtype != "bfloat16":
        norm = _norm(jit_gradients)
        worst = max(np.sqrt(((a - b) ** 2).sum()) for a, b in zip(gradients, jit_gradients, strict=True)) / norm
        yield {"measure": "step-1 gradients, per leaf / norm", "value": float(worst), "bound": 1e-6}
        yield {"measure": "step-1 gradient norm", "value": abs(_norm(gradients) / norm - 1), "bound": 1e-6}


def rows(quick: bool) -> Iterator[Row]:
    jax.config.update("jax_enable_x64", True)  # so that every dtype draws the same dropout masks
    for model, make in CASES.items():
        plans = PLANS[model][1:] if quick else PLANS[model]
        for optimizer, chain in OPTIMIZERS.items():
            if quick and model == "gpt" and optimizer == "clip+adamw":
                continue
            exact = run(make(jnp.float64), chain(), jax.jit, jax.value_and_grad)
            for dtype, kind in DTYPES.items():
                if quick and dtype == "bfloat16" and model == "gpt":
                    continue
                case = make(kind)
                jit = exact if dtype == "float64" else run(case, chain(), jax.jit, jax.value_and_grad)
                for name, plan, devices in plans[-1:] if quick and model == "gpt" else plans:
                    ours = run(case, chain(), jscaler.parallelize(plan, devices=devices), jscaler.value_and_grad)
                    for row in measures(dtype, ours, jit, exact):
                        where = {"model": model, "plan": name, "dtype": dtype, "devices": devices}
                        yield {**where, **row, "measure": f"{optimizer}: {row['measure']}"}


if __name__ == "__main__":
    main("parity", __doc__ or "", COLUMNS, rows)
