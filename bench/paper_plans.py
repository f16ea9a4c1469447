"""The configurations that a sweep goes over: each plan over (dp, tp, pp, rows of a micro-batch, parts), as plans' texts."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.paper_models import Model
from jscaler.errors import divisors

ROWS = (1, 2, 4, 8)  # of a micro-batch on a device
MANY = 1 << 30
HOST = 8  # devices; tensor parallelism stays inside, as Megatron-LM advises; its own may have no choice


@dataclass(frozen=True)
class Config:
    """One configuration.

    Attributes:
        plan: the row of the table that it belongs to.
        new: whether it is one of the paper's own plans.
        tp: tensor parallelism; of tables of the Evoformer that of their axes, if ``axial``.
        rows: of a micro-batch on each device.
        saved: what is done to hold less: ``""``, ``"recompute"``, ``"apart"`` (that in blocks of its own, of
            stages) or ``"co_shard"``, in ``parts``.
        zero: what is split over ``dp``.
        schedule: of ``pp`` stages.
        loss: whether co-shard runs the loss along the tokens, of which a model of images has none.
    """

    plan: str
    new: bool
    dp: int
    tp: int
    pp: int
    rows: int
    microbatches: int
    saved: str = ""
    parts: int = 1
    zero: int = 0
    sequence: bool = False
    schedule: str = "1f1b"
    loss: bool = True
    axial: bool = False

    @property
    def inner(self) -> str:
        """What the devices of a stage do."""
        if self.axial and self.tp > 1:
            plan = f"dap(dap={self.tp}, dp={self.dp})"
        elif self.tp > 1:
            more = ", sequence=True" * self.sequence + f", zero={self.zero}" * bool(self.zero)
            plan = f"megatron(dp={self.dp}, tp={self.tp}{more})"
        else:
            plan = f"zero{self.zero}()" if self.zero else "data_parallel()"
        if self.saved == "co_shard":
            return f"co_shard({self.parts}{'' if self.loss else ', loss=False'}, plan={plan})"
        return f"recompute_layers({plan})" if self.saved and not self._is_apart else plan

    @property
    def _is_apart(self) -> bool:
        return self.saved == "apart" and self.pp > 1

    @property
    def text(self) -> str:
        """As on the command line."""
        if self.pp > 1 and self.schedule in STAGED:
            recompute = ", recompute=True" if self._is_apart else ""
            return f"{STAGED[self.schedule]}({self.pp}, {self.microbatches}, plan={self.inner}{recompute})"
        if self.pp > 1:
            schedule = "" if self.schedule == "1f1b" else f", schedule='{self.schedule}'"
            return f"pipeline({self.pp}, {self.microbatches}{schedule}, plan={self.inner})"
        return f"accumulate({self.microbatches}, {self.inner})" if self.microbatches > 1 else self.inner

    @property
    def grid(self) -> tuple[int, ...]:
        """How devices share state."""
        return self.dp, self.tp, self.pp, self.zero

    @property
    def saving(self) -> tuple[float, ...]:
        """Of two configurations of a grid the larger holds less."""
        return -self.rows, bool(self.saved), self.parts, self.sequence

    @property
    def waiting(self) -> float:
        """Of a schedule: how much longer it takes than its micro-batches one after the other."""
        if self.schedule == "interlaced":
            return 1.0  # only the layers wait, which may be little of all
        chunks = 1 if self.schedule in ("1f1b", "gpipe") else 2
        return 1 + (self.pp - 1) / (chunks * self.microbatches)


SAVED = (("", 1), ("recompute", 1))
PARTS = (("co_shard", 2), ("co_shard", 4), ("co_shard", 8), ("co_shard", 16))
STAGED = {"interlaced": "interlaced", "3f1b": "three_f_one_b"}
SCHEDULES = {"megatron": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved", "chimera": "chimera"}


def configs(model: Model, gpus: int) -> Iterator[Config]:
    """All configurations of all plans. AlphaFold2's rivals are ZeRO, axial parallelism, and stages of it: nobody splits its
    kernels. Swin has none with two stages of a stack on one group, as Chimera's are."""
    grids = grids_of(model, gpus)
    staged, axial = [grid for grid in grids if grid[2] > 1], model.name == "evoformer"
    for zero, plan in enumerate(("data_parallel", "zero1", "zero2", "zero3")):
        yield from spread(model, gpus, plan, False, SAVED, zeros=(zero,), grids=[(gpus, 1, 1)])
    if axial:
        yield from spread(model, gpus, "dap", False, SAVED, grids=[g for g in grids if g[1:] != (1, 1)])
        yield from spread(model, gpus, "three_f_one_b", True, SAVED, grids=staged, schedule="3f1b")
        return
    for plan, schedule in SCHEDULES.items():
        if plan == "chimera" and model.name == "swin":
            continue
        own = [g for g in grids_of(model, gpus, gpus) if g[1:] != (1, 1)] if plan == "megatron" else staged
        sequences = (False, True) if model.name in ("gpt", "mbart") else (False,)
        yield from spread(model, gpus, plan, False, SAVED, grids=own, schedule=schedule, sequences=sequences)
    if model.name in ("gpt", "swin"):
        yield from spread(model, gpus, "co_shard", True, PARTS, zeros=(0, 1, 2, 3), grids=grids)
    if model.name == "mbart":
        for plan, saved in (("interlaced blocks", SAVED[1:]), ("interlaced", (SAVED[0], ("apart", 1)))):
            yield from spread(model, gpus, plan, True, saved, grids=staged, schedule="interlaced", sequences=(False, True))


def grids_of(model: Model, gpus: int, most: int = HOST) -> list[tuple[int, int, int]]:
    """(dp, tp, pp): stages have as many layers each, where layers are alike; tp is ``most`` at most."""
    tps = [n for n in divisors(gpus) if n <= most]
    depth, alike = model.depth, model.name != "swin"
    every = ((gpus // tp // pp, tp, pp) for tp in tps for pp in divisors(gpus // tp))
    return [(dp, tp, pp) for dp, tp, pp in every if pp <= depth and not (alike and depth % pp)]


def spread(
    model: Model, gpus: int, plan: str, new: bool, saved: tuple[tuple[str, int], ...],
    grids: list[tuple[int, int, int]], zeros: tuple[int, ...] = (0,), sequences: tuple[bool, ...] = (False,),
    schedule: str = "1f1b",
) -> Iterator[Config]:  # fmt: skip
    for (dp, tp, pp), (how, parts), rows, zero, sequence in itertools.product(grids, saved, ROWS, zeros, sequences):
        microbatches, left = divmod(model.batch, dp * rows)
        fewer = microbatches < pp or (schedule == "interleaved" and microbatches % pp) or (schedule == "chimera" and pp % 2)
        if left or not microbatches or fewer or (zero and dp == 1) or (sequence and tp == 1):
            continue
        if tp * parts > getattr(model.config, "heads", MANY):
            continue
        if zero > 1 and pp > 1:  # a gradient's parts would be sent for every micro-batch of every stage
            continue
        loss = model.name != "swin"
        axial = model.name == "evoformer"
        yield Config(plan, new, dp, tp, pp, rows, microbatches, how, parts, zero, sequence, schedule, loss, axial)
