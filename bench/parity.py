"""Does every plan give one device's numbers? Design, section 4: float64 to rounding; float32 and bfloat16 no further
from the float64 run than 1.5 times ``jax.jit`` itself; step-1 gradients per leaf against the global norm.

Five steps with clipping and AdamW, and five with momentum SGD and no clipping, which would hide a gradient that is n
times too large. Dropout is on; all runs draw the same masks. The models and their plans stand in `bench.parity_cases`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import jscaler
from bench.harness import Row, main
from bench.parity_cases import CASES, DTYPES, STEPS, Case

COLUMNS = ("model", "plan", "dtype", "devices", "measure", "value", "bound")
LEARNING_RATE = 1e-2
# The bias of the keys in softmax attention has a true gradient of 0; what is computed is rounding. Adam divides it by
# its epsilon, so such leaves may differ by that many learning rates, and are held to that instead.
ROUNDING, ADAM_EPS = 1e-14, 1e-8
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip+adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE)),
    "momentum": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
}


def run(case: Case, optimizer: optax.GradientTransformation, decorate: Callable[..., Any], vg: Any) -> tuple[Any, Any]:
    """Parameters after five steps, and the gradients of the first."""

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, moments, rest = state
        (loss, rest), gradients = vg(lambda p: case.loss(p, rest, batch, key), has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, rest), loss, gradients

    decorated = decorate(step)
    state = (case.params, optimizer.init(case.params), case.rest)
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
    for model, (make, runs) in CASES.items():
        chosen = [one for one in runs if one.quick or not quick]
        for optimizer, chain in OPTIMIZERS.items():
            if not chosen or (quick and optimizer == "clip+adamw"):
                continue
            exact = run(make(DTYPES["float64"]), chain(), jax.jit, jax.value_and_grad)
            for dtype, kind in DTYPES.items():
                if quick and dtype != "float64":
                    continue
                case = make(kind)
                jit = exact if dtype == "float64" else run(case, chain(), jax.jit, jax.value_and_grad)
                for one in chosen:
                    plan = jscaler.parallelize(one.plan, devices=one.devices)
                    ours = run(case, chain(), plan, jscaler.value_and_grad)
                    where = {"model": model, "plan": one.name, "dtype": dtype, "devices": one.devices}
                    for row in measures(dtype, ours, jit, exact):
                        yield {**where, **row, "measure": f"{optimizer}: {row['measure']}"}


if __name__ == "__main__":
    main("parity", __doc__ or "", COLUMNS, rows)
