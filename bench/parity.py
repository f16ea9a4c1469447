"""Does every plan give one device's numbers? Design, section 4: float64 to rounding; float32 and bfloat16 no further
from the float64 run than 1.5 times ``jax.jit`` itself; step-1 gradients per leaf against the global norm.

Five steps with clipping and AdamW, and five with momentum SGD and no clipping, which would hide a gradient that is n
times too large. Dropout is on; all runs draw the same masks. The models and their plans stand in `bench.parity_cases`,
other optimizers and master weights under every plan in `bench.parity_updates`.

With Adam, one run says little about how far ``jax.jit`` lies from float64: an element whose gradient is rounding moves by
whole learning rates (the convolutional net in float32: 4e-6 to 2.4e-3 over six starts that differ by rounding). So a row
that misses its bound against one run of ``jax.jit`` is measured again, against the largest of several, whose parameters
start at most half a unit in the last place elsewhere; its measure says so.

XLA runs without its passes over machine code, on all sides: they take half of the time.
"""

import dataclasses
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler
from bench import parity_updates
from bench.harness import Row, compile_fast, main
from bench.parity_cases import CASES, DTYPES, PIPELINES, STEPS, Case, Run

COLUMNS = ("model", "plan", "dtype", "devices", "measure", "value", "bound")
LEARNING_RATE = 1e-2
# The bias of the keys in softmax attention has a true gradient of 0; what is computed is rounding. Adam divides it by
# its epsilon, so such leaves may differ by that many learning rates, and are held to that instead.
ROUNDING, ADAM_EPS = 1e-14, 1e-8
SHAKEN = 8  # runs of jax.jit from other starts, where one run is not enough to say how far it lies from float64
BOUND = 1.5
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip+adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE)),
    "momentum": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
}


def step_of(case: Case, optimizer: optax.GradientTransformation, vg: Any) -> Callable[..., Any]:
    """``step(state, batch, key) -> (state, loss, gradients)``."""

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, moments, rest = state
        (loss, rest), gradients = vg(lambda p: case.loss(p, rest, batch, key), has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, rest), loss, gradients

    return step


def run(case: Case, optimizer: optax.GradientTransformation, decorate: Callable[..., Any], vg: Any) -> tuple[Any, Any]:
    """Parameters after a step on each batch, and the gradients of the first."""
    decorated, state, first = decorate(step_of(case, optimizer, vg)), case.state(optimizer), None
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


def shaken(case: Case, dtype: Any, seed: int) -> Case:
    """``case`` with its parameters rounded another way: each at most half a unit in the last place of ``dtype`` off."""
    draws, half = np.random.default_rng(seed), float(jnp.finfo(dtype).eps) / 2

    def shake(x: Any) -> Any:
        return (x * (1 + half * draws.uniform(-1, 1, x.shape))).astype(x.dtype)

    return dataclasses.replace(case, params=jax.tree.map(shake, case.params))


def measures(
    dtype: str, ours: tuple[Any, Any], jit: tuple[Any, Any], exact: tuple[Any, Any], others: Callable[[], list[Any]]
) -> Iterator[Row]:
    """The rows of one run; ``exact`` is the float64 run of ``jax.jit``, ``others`` gives its runs from other starts."""
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
        for i, what in enumerate(("parameters", "gradients")):
            mine, theirs, against = _distance(ours[i], exact[i]), _distance(jit[i], exact[i]), "jit's"
            if mine + floor > BOUND * (theirs + floor):
                theirs = max(theirs, *(_distance(run[i], exact[i]) for run in others()))
                against = f"the largest of {SHAKEN + 1} of jit's"
            row = {"measure": f"{what}, L2 to float64 / {against}", "value": (mine + floor) / (theirs + floor)}
            yield {**row, "bound": BOUND}
    if dtype != "bfloat16":
        norm = _norm(jit_gradients)
        worst = max(np.sqrt(((a - b) ** 2).sum()) for a, b in zip(gradients, jit_gradients, strict=True)) / norm
        yield {"measure": "step-1 gradients, per leaf / norm", "value": float(worst), "bound": 1e-6}
        yield {"measure": "step-1 gradient norm", "value": abs(_norm(gradients) / norm - 1), "bound": 1e-6}


OPTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "default": "",
        "metavar": "TEXT",
        "help": "only models whose name holds this, or one of these: 'mlp|MoE'; 'updates': optimizers and masters",
    },
    "plan": {
        "default": "",
        "metavar": "TEXT",
        "help": "only plans whose name holds this, or one of these: 'pipeline(|pp='",
    },
    "workers": {"type": int, "default": 2, "help": "processes"},
}


def rows(quick: bool, model: str, plan: str, workers: int) -> Iterator[Row]:
    compile_fast()
    jax.config.update("jax_enable_x64", True)  # so that every dtype draws the same dropout masks
    if quick or workers == 1:
        for task in tasks(quick, model, plan):
            yield from task_rows(task)
    else:
        with multiprocessing.get_context("spawn").Pool(workers, start, maxtasksperchild=2) as pool:
            yield from itertools.chain.from_iterable(pool.imap(task_rows, tasks(quick, model, plan)))
    if model in parity_updates.NAME and not plan:
        yield from parity_updates.rows(quick)


def start() -> None:
    """A worker is as this process: CPU devices, and 64 bits."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with one optimizer in one type, and which of its plans are run.

    Of pipelines, whose blocks take long to compile, every plan is run in every type, with the two optimizers in turn.
    """

    model: str
    optimizer: str
    dtype: str
    quick: bool
    plan: str

    @property
    def chosen(self) -> list[Run]:
        staged = enumerate(PIPELINES.get(self.model, ()), list(DTYPES).index(self.dtype))
        in_turn = [one for number, one in staged if self.quick or number % 2 == list(OPTIMIZERS).index(self.optimizer)]
        every = (*CASES[self.model][1], *in_turn)
        return [one for one in every if (one.quick or not self.quick) and _holds(one.name, self.plan)]


def tasks(quick: bool, holds: str, plan_holds: str) -> list[Task]:
    """Every model, with both optimizers, in every type."""
    optimizers, dtypes = (["momentum"], ["float64"]) if quick else (OPTIMIZERS, DTYPES)
    found = (Task(*one, quick, plan_holds) for one in itertools.product(CASES, optimizers, dtypes))
    return [task for task in found if _holds(task.model, holds) and task.chosen]


def _holds(name: str, texts: str) -> bool:
    """Whether ``name`` has one of ``texts``, which ``|`` parts."""
    return any(text in name for text in texts.split("|"))


def task_rows(task: Task) -> list[Row]:
    """A model under its plans."""
    make, chain = CASES[task.model][0], OPTIMIZERS[task.optimizer]
    kind, case = DTYPES[task.dtype], make(DTYPES[task.dtype])

    @functools.cache
    def one_device(blocks: int) -> tuple[Any, Any]:
        """`jax.jit`'s run, and its run in float64."""
        exact = run(_plain(make(DTYPES["float64"]), blocks), chain(), jax.jit, jax.value_and_grad)
        if task.dtype == "float64":
            return exact, exact
        return run(_plain(case, blocks), chain(), jax.jit, jax.value_and_grad), exact

    @functools.cache
    def others(blocks: int) -> list[Any]:
        starts = (shaken(_plain(case, blocks), kind, seed) for seed in range(SHAKEN))
        return [run(start, chain(), jax.jit, jax.value_and_grad) for start in starts]

    found = []
    for one in task.chosen:
        ours = run(case, chain(), jscaler.parallelize(one.plan, devices=one.devices), jscaler.value_and_grad)
        where = {"model": task.model, "plan": one.name, "dtype": task.dtype, "devices": one.devices}
        blocks = one.blocks if case.alone is not None else 1
        for row in measures(task.dtype, ours, *one_device(blocks), functools.partial(others, blocks)):
            found.append({**where, **row, "measure": f"{task.optimizer}: {row['measure']}"})
    return found


def _plain(case: Case, blocks: int) -> Case:
    """What one device computes."""
    alone = case.alone
    return case if alone is None else dataclasses.replace(case, loss=lambda *args: alone(*args, blocks))


if __name__ == "__main__":
    main("parity", __doc__ or "", COLUMNS, rows, options=OPTIONS)
