"""Pipelines: time of a step against 1F1B written by hand, and what is sent, kept, computed and alive.

The rival is `bench.pipeline_by_hand`: 4 stages of a dense layer, 8 micro-batches, a virtual CPU device each, both in one
process, by turns, median of rounds. What a stage keeps from its forward for its backward is held against the residuals of
``jax.vjp`` of that stage, its parameters not counted; its products against those of that forward and backward.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

import jscaler
from bench import pipeline_by_hand as by_hand
from bench.harness import Row, main
from jscaler import plans
from jscaler.capture.jaxprs import all_equations
from jscaler.lower.instructions import Run, Send
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan
from jscaler.report.block_rows import kept_bytes
from jscaler.tables import SCHEDULES
from jscaler.xla_model.flops import flops_of
from models import llama
from models.gpt import Block, GPTConfig

COLUMNS = ("case", "width", "measure", "value", "bound")
STAGES, MICROBATCHES, ROWS = by_hand.STAGES, by_hand.MICROBATCHES, 8
TIMES = {64: 1.15, 1024: 1.06}  # of the hand-written step
GPT = GPTConfig(hidden=64, layers=2, heads=4, sequence=32, dropout=0.0)
LLAMA = llama.LlamaConfig(hidden=64, layers=2, heads=4, groups=2, units=176, sequence=32)


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The rival's model: dense layers with relu in between, mean squared error."""
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x @ w + b
            x = jnp.maximum(x, 0) if i < len(params) - 1 else x
    with jax.named_scope(f"layer_{len(params) - 1}"):
        return jnp.mean((x - y) ** 2)


def sgd(params: Any, x: jax.Array, y: jax.Array) -> Any:
    loss, grads = jscaler.value_and_grad(loss_of)(params, x, y)
    return jax.tree.map(lambda p, g: p - by_hand.RATE * g, params, grads), loss


def mlp(width: int, microbatches: int = MICROBATCHES) -> tuple[Any, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    params = [(rng.standard_normal((width, width)) / width**0.5, np.zeros(width)) for _ in range(STAGES)]
    x, y = (rng.standard_normal((microbatches * ROWS, width)).astype(np.float32) for _ in range(2))
    return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params), jnp.asarray(x), jnp.asarray(y)


def pipelined(step: Callable[..., Any], stages: int, microbatches: int, schedule: str = "1f1b") -> Any:
    layers = [f"layer_{i}" for i in range(1, stages * SCHEDULES[schedule].chunks_of(None))]
    plan = plans.pipeline(stages, microbatches, schedule, at=layers, batch="x")
    return jscaler.parallelize(plan, devices=stages, donate_argnames="params")(step)


def times(width: int, rounds: int, steps: int) -> tuple[float, float]:
    """Median seconds of a step: ours, and by hand."""
    devices = jax.devices()
    params, x, y = mlp(width)
    on = [jax.sharding.SingleDeviceSharding(d) for d in devices[:STAGES]]
    ws, bs = ([jax.device_put(p[i], d) for p, d in zip(params, on, strict=True)] for i in (0, 1))
    xs, ys = ([jax.device_put(m, on[s]) for m in a.reshape(MICROBATCHES, ROWS, width)] for a, s in ((x, 0), (y, -1)))
    rival = by_hand.pipeline(width, ROWS, devices)
    train = pipelined(sgd, STAGES, MICROBATCHES)
    state: Any = jax.tree.map(jnp.copy, params)
    compiled = train.lower(state, x, y).compile()
    x, y = (jax.device_put(a, compiled.lowered.executable.in_shardings[i]) for i, a in ((-2, x), (-1, y)))
    theirs: Any = ws, bs
    found: tuple[list[float], list[float]] = [], []
    for round_ in range(rounds + 1):
        for which in (0, 1):
            start = time.perf_counter()
            for _ in range(steps):
                if which == 0:
                    state, done = compiled(state, x, y)
                else:
                    *theirs, done = rival(theirs[0], theirs[1], xs, ys)
                jax.block_until_ready((state, theirs, done))
            if round_:  # the first warms up
                found[which].append((time.perf_counter() - start) / steps)
    off = max(float(jnp.abs(a - jax.device_put(b, jax.devices()[0])).max()) for (a, _), b in zip(
        jax.device_get(state), jax.device_get(theirs[0]), strict=True))  # fmt: skip
    assert off < 1e-4, f"the two differ by {off}"
    return statistics.median(found[0]), statistics.median(found[1])


def per_instruction(rounds: int, steps: int) -> Iterator[Row]:
    """Seconds of a step by its blocks and sends, of several schedules by turns, beside 1F1B's."""
    params, x, y = mlp(64)
    runs: dict[str, tuple[Any, int]] = {}
    for schedule in ("1f1b", "zb_h1", "interleaved", "zb_v"):
        groups = STAGES // SCHEDULES[schedule].chunks_of(None)
        compiled = pipelined(sgd, groups, MICROBATCHES, schedule).lower(params, x, y).compile()
        count = sum(isinstance(one, Run | Send) for one in compiled.plan.instructions.steps)
        runs[schedule] = compiled, count
    seconds: dict[str, list[float]] = {schedule: [] for schedule in runs}
    for round_ in range(rounds + 1):
        for schedule, (compiled, count) in runs.items():
            state: Any = jax.tree.map(jnp.copy, params)
            start = time.perf_counter()
            for _ in range(steps):
                state, _ = jax.block_until_ready(compiled(state, x, y))
            seconds[schedule] += [(time.perf_counter() - start) / steps / count] if round_ else []
    middle = {schedule: statistics.median(own) for schedule, own in seconds.items()}
    for schedule in ("zb_h1", "interleaved", "zb_v"):
        value = middle[schedule] / middle["1f1b"]
        yield {
            "case": schedule,
            "width": 64,
            "measure": "seconds of a block or send / 1f1b's",
            "value": value,
            "bound": 1.15,
        }


def body_blocks(plan: StepPlan) -> list[PlacedBlock]:
    assert plan.spanning is not None
    return sorted((b for b in plan.blocks if b.phase in plan.spanning.phases), key=lambda block: block.level)


def residual_bytes(stage: Callable[..., Any], params: Any, x: jax.Array) -> int:
    """What ``jax.vjp`` of a stage keeps, but for its parameters."""
    own = jax.tree.leaves(params)
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(stage, params, x)[1]) if np.ndim(leaf)}
    return sum(leaf.nbytes for leaf in kept.values() if not any(leaf is p for p in own) and leaf.shape[:1] == x.shape[:1])


def products(eqns: Iterable[core.JaxprEqn]) -> float:
    """Operations of products."""
    return sum(flops_of(eqn).count for eqn in eqns if eqn.primitive.name == "dot_general")


Stages = tuple[str, StepPlan, Callable[..., Any], Any, jax.Array]


def stages_of_gpt() -> Stages:
    """Two blocks of a GPT as two stages."""
    block = Block(GPT)
    x = jnp.ones((8, GPT.sequence, GPT.hidden))
    params = [block.init(jax.random.key(i), x, False)["params"] for i in range(2)]
    return stages_of("GPT block", lambda params, x: block.apply({"params": params}, x, False), params, x)


def stages_of_llama() -> Stages:
    """Two blocks of a Llama as two stages."""
    blocks = [llama.Block(LLAMA, nnx.Rngs(i)) for i in range(2)]
    graph = nnx.graphdef(blocks[0])
    x = jnp.ones((8, LLAMA.sequence, LLAMA.hidden))
    params = [nnx.state(block, nnx.Param) for block in blocks]
    return stages_of("Llama block", lambda params, x: nnx.merge(graph, params)(x), params, x)


def stages_of(case: str, stage: Callable[..., Any], params: Sequence[Any], x: jax.Array) -> Stages:
    """Two equal stages: the plan, and the first of them as a function of its parameters and input."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for i, p in enumerate(params):
                with jax.named_scope(f"layer_{i}"):
                    h = stage(p, h)
            with jax.named_scope("layer_1"):
                return jnp.mean(h**2)

        value, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plan = pipelined(step, 2, 2).lower(params, x).plan
    return case, plan, stage, params[0], x[: x.shape[0] // 2]


def stages_of_mlp() -> Stages:
    params, x, y = mlp(64)

    def stage(params: Any, x: jax.Array) -> jax.Array:
        return jnp.maximum(x @ params[0] + params[1], 0)

    plan = pipelined(sgd, STAGES, MICROBATCHES).lower(params, x, y).plan
    return "dense and relu", plan, stage, params[0], x[:ROWS]


def kept_rows() -> Iterator[Row]:
    for case, plan, stage, params, x in (stages_of_mlp(), stages_of_gpt(), stages_of_llama()):
        own = [b for b in body_blocks(plan) if b.group == plan.completed.groups[min(1, len(plan.completed.groups) - 2)]]
        of_vjp = residual_bytes(stage, params, x)
        kept = kept_bytes(plan, plan.blocks.index(own[0])) + (x.nbytes if own[0].level == 0 else 0)
        yield {
            "case": case,
            "measure": "bytes kept of a micro-batch / jax.vjp's residuals",
            "value": kept / of_vjp,
            "bound": 1.05,
        }
        _, back = jax.vjp(stage, params, x)
        once = products(all_equations(jax.make_jaxpr(stage)(params, x).jaxpr))
        both = once + products(all_equations(jax.make_jaxpr(back)(x).jaxpr))
        ours = sum(products(block.flat.equations) for block in own)
        yield {
            "case": case,
            "measure": "operations of forward and backward / jax.vjp's",
            "value": ours / both,
            "bound": 1.01,
        }


def size_rows() -> Iterator[Row]:
    """Blocks and equations do not grow with micro-batches; live ones are what the schedule says; sends are 2(S - 1)."""
    for schedule in ("1f1b", "gpipe"):
        sizes = []
        for microbatches in (8, 32, 128):
            plan = pipelined(sgd, STAGES, microbatches, schedule).lower(*mlp(64, microbatches)).plan
            sizes.append((len(plan.blocks), sum(len(b.flat.items) for b in plan.blocks)))
            most = [STAGES - s if schedule == "1f1b" else microbatches for s in range(STAGES)]
            most[-1] = 1 if schedule == "1f1b" else microbatches
            over = max(n - m for n, m in zip(plan.under_way.values(), most, strict=True))
            case = f"{schedule}, {microbatches} micro-batches"
            yield {"case": case, "measure": "micro-batches under way beyond the schedule's", "value": over, "bound": 0}
            sent = sum(t.phase in plan.spanning.phases for t in plan.sent)  # type: ignore[union-attr]
            yield {"case": case, "measure": "sends of a micro-batch", "value": sent, "bound": 2 * (STAGES - 1)}
        case = f"{schedule}, 8, 32, 128 micro-batches"
        for measure, own in zip(("kinds of blocks", "equations"), zip(*sizes, strict=True), strict=True):
            yield {"case": case, "measure": measure, "value": max(own), "bound": min(own)}


def live_row(steps: int) -> Row:
    params, x, y = mlp(64)
    train = pipelined(sgd, STAGES, MICROBATCHES)
    state, counts = params, []
    for _ in range(steps):
        state, loss = train(state, x, y)
        jax.block_until_ready((state, loss))
        counts.append(len(jax.live_arrays()))
    return {
        "case": "1f1b",
        "measure": f"arrays alive after {steps} steps, beyond those after 3",
        "value": counts[-1] - counts[2],
        "bound": 0,
    }


def rows(quick: bool) -> Iterator[Row]:
    yield from kept_rows()
    yield from size_rows()
    yield live_row(6 if quick else 20)
    if not quick:
        yield from per_instruction(5, 40)
    for width, bound in list(TIMES.items())[: 1 if quick else None]:
        ours, theirs = times(width, 5, 4 if width > 500 else 40)
        row = {
            "case": "4 stages, 8 micro-batches",
            "width": width,
            "measure": "seconds of a step / by hand",
            "value": ours / theirs,
        }
        yield row if quick else {**row, "bound": bound}
        yield {**row, "measure": "milliseconds of a step", "value": 1e3 * ours}


if __name__ == "__main__":
    main("pipeline", __doc__ or "", COLUMNS, rows)
