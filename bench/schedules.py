"""Schedules: are their tables those of the literature, and do steps that follow them give one device's numbers?

Rows of golden values hold a table, simulated without communication, to what was published or derived from it: a device's
work on a micro-batch is F = I = W = 1 and B = 2, each chunk has its share of that; ``seconds`` says where it is other. The
peak is of the first group, in micro-batches of all its chunks.

Rows that are searched hold optima that the schedule search finds and proves to golden values (`bench.schedule_optima`);
``took`` is in seconds, until the proof.

Rows of a GPT 1.3B (`bench.schedule_bubbles`) hold a step's estimated seconds, as a share of 1F1B's (``of_1f1b``), to the
share that the bubbles say (``told``), and the time by which sends make it longer to 1F1B's (``sends``).

Rows of models train a GPT (tied embedding, dropout, clipping, AdamW), or a Llama in nnx, in float64, five steps:
``of_bound`` is the worst of what `bench.parity` measures against one device, by its bound. They are right if that is at
most 1, the table is the published one, and the groups ran its cells in its order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from bench import parity
from bench.harness import Row, compile_fast, main
from bench.parity_cases import Case, cross_entropy, gpt, kinds, llama
from bench.schedule_bubbles import bubble_rows
from bench.schedule_optima import optima_rows
from jscaler import plans
from jscaler.lower.instructions import Run
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh
from jscaler.tables import SCHEDULES, BlockKind, TableCell
from jscaler.tables.legal import halves_of
from jscaler.tables.simulator import UNITS, idle, most_activations, simulate_table
from jscaler.tables.table import cells_of
from jscaler.tables.timeline import Timeline

COLUMNS = (
    "schedule", "model", "stages", "microbatches", "chunks", "seconds", "measure", "makespan", "golden", "peak",
    "golden_peak", "proved", "took", "of_1f1b", "told", "sends", "of_bound", "right",
)  # fmt: skip
TIMES: dict[str, Mapping[BlockKind, float]] = {
    "": UNITS,
    "B = F": {"F": 1.0, "B": 1.0},
    "1, 1.2, 0.8": {"F": 1.0, "I": 1.2, "W": 0.8, "B": 2.0},
    "of a chunk": {kind: 2 * own for kind, own in UNITS.items()},
}
MEASURES: dict[str, Callable[[Timeline], float]] = {
    "makespan": lambda timeline: timeline.makespan,
    "idle of the first": lambda timeline: idle(timeline, 0),
    "longest span": lambda timeline: max(span(timeline, device) for device in timeline.devices),
}


def span(timeline: Timeline, device: int) -> float:
    """Seconds from the begin of a device's first run to the end of its last."""
    return timeline.busy(device) + idle(timeline, device)


@dataclass(frozen=True)
class Golden:
    """What a schedule of so many stages (device groups), micro-batches and chunks should measure."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    value: float
    peak: float | None = None
    seconds: str = ""
    measure: str = "makespan"


GOLDEN = [
    Golden("gpipe", 4, 4, 1, 21, 4),
    Golden("gpipe", 4, 8, 1, 33, 8),
    Golden("gpipe", 8, 32, 1, 117, 32),
    Golden("1f1b", 4, 4, 1, 21, 4),
    Golden("1f1b", 4, 8, 1, 33, 4),
    Golden("1f1b", 8, 32, 1, 117, 8),
    Golden("eager_1f1b", 4, 4, 1, 21, 4),
    Golden("eager_1f1b", 4, 8, 1, 33, 7),
    Golden("eager_1f1b", 8, 32, 1, 117, 15),
    Golden("interleaved", 4, 8, 2, 28.5, 5.5),
    Golden("interleaved", 8, 32, 2, 106.5, 11.5),
    Golden("interleaved", 4, 8, 4, 26.25, 4.75),
    Golden("interleaved", 8, 32, 4, 101.25, 9.75),
    Golden("breadth_first", 4, 8, 2, 28.5, 8),
    Golden("breadth_first", 8, 32, 2, 106.5, 32),
    Golden("breadth_first", 4, 8, 4, 26.25, 8),
    Golden("breadth_first", 8, 32, 4, 101.25, 32),
    Golden("zb_h1", 4, 8, 1, 27, 4),
    Golden("zb_h1", 8, 32, 1, 103, 8),
    Golden("zb_h1", 4, 8, 1, 28.2, 4, "1, 1.2, 0.8"),
    Golden("zb_h2", 4, 8, 1, 27, 7),
    Golden("zb_h2", 8, 32, 1, 103, 15),
    Golden("zb_h2", 4, 8, 1, 24, 7, measure="longest span"),
    Golden("zb_h2", 8, 32, 1, 96, 15, measure="longest span"),
    Golden("zb_h2", 4, 8, 1, 25.8, 7, "1, 1.2, 0.8", "longest span"),
    Golden("zb_v", 4, 8, 2, 25.5, 4),
    Golden("zb_v", 4, 16, 2, 49.5, 4),
    Golden("zb_v", 8, 32, 2, 99.5, 8),
    Golden("zb_v", 8, 32, 2, 96, 8, measure="longest span"),
    Golden("dualpipe_v", 4, 16, 2, 6, 4.5, "of a chunk", "idle of the first"),
    Golden("dualpipe_v", 8, 32, 2, 14, 8.5, "of a chunk", "idle of the first"),
    Golden("chimera", 4, 4, 1, 10, 3, "B = F"),
    Golden("chimera", 6, 6, 1, 16, 4, "B = F"),
    Golden("chimera", 4, 4, 1, 16, 3),
    Golden("chimera", 6, 6, 1, 26, 4),
    Golden("forward_only", 4, 8, 1, 11, 0),
]


def golden_row(golden: Golden) -> Row:
    """A schedule's table beside its golden values."""
    table = SCHEDULES[golden.schedule].table(golden.stages, golden.microbatches, golden.chunks)
    seconds: Mapping[BlockKind, float] = {kind: own / golden.chunks for kind, own in TIMES[golden.seconds].items()}
    value = MEASURES[golden.measure](simulate_table(table, seconds))
    peak = most_activations(table.rows[0]) / golden.chunks
    right = abs(value - golden.value) < 1e-9 and golden.peak in (None, peak)
    named = {key: getattr(golden, key) for key in ("schedule", "stages", "microbatches", "chunks", "seconds", "measure")}
    return named | {
        "makespan": round(value, 9), "golden": golden.value, "peak": peak, "golden_peak": golden.peak, "right": right,
        "wrong": int(not right), "bounds": {"wrong": 0},
    }  # fmt: skip


# -- models that follow them


def out_of_order(plan: StepPlan) -> list[str]:
    """The rows of a step's table whose cells no group has run in that order.

    A block that is cut in two, or several that are one executable, stand for the same cells; those of an entry run in any
    order. Where nothing waits for the gradient of a stage's input there is no I. An R that the table does not name runs
    with the backward that reads it.
    """
    ran: dict[DeviceMesh, list[TableCell]] = {}
    for one in plan.instructions.steps:
        if isinstance(one, Run) and plan.instructions.cells(one):
            ran.setdefault(plan.blocks[one.block].group, []).extend(_in_halves(plan.instructions.cells(one)))
    every = {(cell.stage, cell.kind) for row in ran.values() for cell in row}
    table = plan.instructions.table
    rows = table.rows if table is not None else ()
    named = {cell for row in rows for cell in cells_of(row)}
    backwards = [[_with_again(entry.cells, named) for entry in row] for row in rows]
    wanted = [
        {c: place for place, cells in enumerate(row) for c in _in_halves(cells) if (c.stage, c.kind) in every}
        for row in backwards
    ]
    assert len(wanted) == len(ran), "each group has a row"
    in_order = [row for own in ran.values() for row in wanted if [*map(row.get, own)] == [*row.values()]]
    return [str(next(iter(row))) for row in wanted if row not in in_order]


def _with_again(cells: Sequence[TableCell], named: Set[TableCell]) -> list[TableCell]:
    again = (dataclasses.replace(cell, kind="R") for cell in cells if cell.kind in "BI")
    return [*cells, *(cell for cell in again if cell not in named)]


def _in_halves(cells: Any) -> list[TableCell]:
    return sorted(half for cell in cells for half in (halves_of(cell) if cell.kind == "B" else (cell,)))


@dataclass(frozen=True)
class Model:
    """A GPT or a Llama of so many layers, in one loop or in a row, on so many stages."""

    layers: int
    stacked: bool
    stages: int
    microbatches: int
    name: str = "GPT"

    def __str__(self) -> str:
        return f"{'stacked ' if self.stacked else ''}{self.name}, {self.layers} layers"

    def case(self, passes: int = 1) -> Case:
        """Its loss and batches; of a GPT's several passes each reads the tokens that the one before found most likely."""
        case = {"GPT": gpt, "Llama": llama}[self.name](jnp.float64, layers=self.layers, stacked=self.stacked)
        return case if passes == 1 else dataclasses.replace(case, loss=functools.partial(self._again, passes))

    def _again(self, passes: int, params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        from models.gpt import GPT, GPTConfig

        sizes = {"hidden": 32, "heads": 4, "sequence": 16, "layers": self.layers, "stacked": self.stacked}
        model, tokens, logits = GPT(GPTConfig(**sizes, **kinds(jnp.float64))), batch["tokens"], None
        for number in range(passes):
            rngs = {"dropout": jax.random.fold_in(key, number)}
            logits = jnp.asarray(model.apply({"params": params}, tokens, train=True, rngs=rngs))
            tokens = jnp.argmax(logits, -1).astype(tokens.dtype)
        return cross_entropy(logits, batch["labels"]), rest

    def ends(self) -> dict[str, Any]:
        """Where stages begin if the embedding and the head lie on all devices."""
        own = self.layers // self.stages
        if self.stacked:
            return {"layers": [own] * self.stages}
        return {"at": [*(f"block_{i}" for i in range(0, self.layers, own)), "norm"]}


MODELS = [
    Model(4, False, 2, 4),
    Model(4, True, 2, 4),
    Model(8, False, 4, 8),
    Model(8, True, 4, 8),
    Model(4, True, 2, 4, "Llama"),
]
QUICK = ("1f1b", "zb_v", "forward_only")


def model_row(model: Model, schedule: str, one_device: Callable[[int], Any]) -> Row:
    """A model trained under a schedule; ``one_device`` gives `jax.jit`'s run of so many passes."""
    known = SCHEDULES[schedule]
    chunks = known.chunks_of(None)
    policy = plans.pipeline(model.stages, model.microbatches, schedule, **(model.ends() if known.everywhere else {}))
    made: list[Any] = []

    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        train = jscaler.parallelize(policy, devices=model.stages)(step)

        def call(*args: Any) -> Any:
            if not made:
                made.append(train.lower(*args).compile())
            return made[0](*args)

        return call

    if schedule == "forward_only":
        found = evaluated(model.case(), decorate)
    else:
        passes = chunks if known.passes else 1
        ours = parity.run(model.case(passes), OPTIMIZER(), decorate, jscaler.value_and_grad)
        jit = one_device(passes)
        found = max(row["value"] / row["bound"] for row in parity.measures("float64", ours, jit, jit, list))
    plan = made[0].plan
    published = plan.instructions.table == known.table(model.stages, model.microbatches, chunks)
    right = found <= 1 and published and not out_of_order(plan)
    return {
        "schedule": schedule, "model": str(model), "stages": model.stages, "microbatches": model.microbatches,
        "chunks": chunks, "of_bound": float(f"{found:.3g}"), "right": right, "wrong": int(not right),
        "bounds": {"wrong": 0},
    }  # fmt: skip


OPTIMIZER = parity.OPTIMIZERS["clip+adamw"]


def evaluated(case: Case, decorate: Callable[..., Any]) -> float:
    """How far the losses of batches are from one device's, by the bound of parameters."""

    def step(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return case.loss(params, case.rest, batch, key)[0]

    ours, plain = decorate(step), jax.jit(step)
    args = [(case.params, batch, jax.random.key(i)) for i, batch in enumerate(case.batches)]
    return max(float(np.abs(ours(*own) - plain(*own)) / plain(*own)) for own in args) / 1e-10


def rows(quick: bool) -> Iterator[Row]:
    yield from map(golden_row, GOLDEN)
    yield from optima_rows(quick)
    yield from bubble_rows(quick)
    compile_fast()
    jax.config.update("jax_enable_x64", True)
    for model in MODELS[:1] if quick else MODELS:

        @functools.cache
        def one_device(passes: int, model: Model = model) -> Any:
            return parity.run(model.case(passes), OPTIMIZER(), jax.jit, jax.value_and_grad)

        for name in QUICK if quick else SCHEDULES:
            if model.name == "GPT" or not SCHEDULES[name].passes:
                yield model_row(model, name, one_device)


if __name__ == "__main__":
    main("schedules", __doc__ or "", COLUMNS, rows)
