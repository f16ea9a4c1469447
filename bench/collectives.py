"""What does a plan send? Kinds, counts and bytes per device from the compiled HLO, beside GSPMD's for the same split.

``tensors`` counts what is moved, ``launches`` how often (XLA launches neighbours together). ``sent`` are bytes that a
device sends. Data parallelism reduces each gradient once. Tensor parallelism reduces activations only: of the 6-layer MLP
five times; with data parallelism beside it, all gradients combine into a sixth. Sequence parallelism has a reduce-scatter
and an all-gather of the same bytes for each. (XLA's CPU backend makes no reduce-scatters of its own: there GSPMD keeps the
all-reduces and sends more.) Expert parallelism has four all-to-alls per layer and step. ZeRO
scatters each gradient once, and all-reduces scalars only. Dynamic axial parallelism has at most six all-to-alls and six
gathers or scatters in an Evoformer's block forward, which have a row each. (Backward, each gather is a scatter.)
The interlaced pipeline all-reduces what is looked up and what logits are made of, backward their gradients, and three
numbers per token; nothing has a table's size, or the logits'. But where words do not divide, a table is exchanged once a
step, and its gradient.

Over micro-batches, gradients are added on each device and reduced once behind the loop: ``accumulate(8)`` sends what the
plan sends without it. ZeRO-2 and ZeRO-3 reduce-scatter in every iteration, and ZeRO-3 gathers its parameters there.

``--target 8xH100-80GB`` compiles for GPUs that need not be there; launches are held to their number there only.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

import jscaler
from bench.harness import Row, compile_fast, main
from bench.steps import DEVICES, EVEN, ROWS, STEPS, Step

COLUMNS = ("case", "plan", "target", "op", "tensors", "launches", "sent", "gspmd_tensors", "gspmd_sent")
SCALARS = 128  # bytes of losses and norms that may be reduced beside the gradients


@dataclass(frozen=True)
class Case:
    """A step under a plan, and what its program must hold.

    Attributes:
        plan: as on the command line.
        shown: its name in the table.
        tensors: kind -> how many tensors, exactly, on virtual CPU devices.
        launches: kind -> how many launches, exactly, on a CUDA target, which makes one array of tensors that combine.
        as_much_as: the plan whose all-reduces take as many bytes as this one's reduce-scatters and all-gathers.
        wider: whether it adds in more bits than GSPMD does on a CUDA target, where that adds what a bfloat16 dot gives; its
            ratio is then shown, and not held to a bound.
        sharded: whether gradients are reduce-scattered once and all-reduces are of scalars.
        quick: whether it is part of the quick form.
    """

    step: str
    plan: str
    shown: str
    tensors: Mapping[str, int] = field(default_factory=dict)
    launches: Mapping[str, int] = field(default_factory=dict)
    as_much_as: str = ""
    wider: bool = False
    sharded: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Accumulated:
    """The MLP under ``accumulate(8, plan)``, and what a device is to send.

    Attributes:
        plan: the inner one.
        inside, outside: kind -> tensors that move in every iteration, and once.
        shares: kind -> how often the bytes of all parameters are sent, by (n - 1)/n; scalars are left out.
        again: whether the kernels of all layers but the first are gathered in every iteration once more, for the backward
            pass. (XLA's CPU backend keeps no fences and merges the second with the first.)
    """

    plan: str
    inside: Mapping[str, int]
    outside: Mapping[str, int]
    shares: Mapping[str, int]
    again: bool = False


MLP = "mlp-6 f32"
FIVE, EIGHT = ({"reduce-scatter": n, "all-gather": n} for n in (5, 8))
ONCE = {"reduce-scatter": 12, "all-gather": 12, "all-reduce": 1}
# fmt: off
CASES = [
    Case(MLP, "data_parallel", "data_parallel", quick=True),
    Case(MLP, f"tensor_parallel({EVEN})", "tensor_parallel", {"all-reduce": 5}, {"all-reduce": 5}, quick=True),
    # 5 of activations, 12 gradients, the loss; the last 13 combine
    Case(MLP, f"megatron(2, 4, columns={EVEN})", "dp 2 × tp 4", {"all-reduce": 18}, {"all-reduce": 6}),
    Case(MLP, f"sequence_parallel({EVEN}, {ROWS})", "sequence_parallel", FIVE, FIVE, "tensor_parallel", quick=True),
    Case("gpt-nano f32", "data_parallel", "data_parallel"),
    # two all-reduces each way and layer
    Case("gpt-nano f32", "tensor_parallel", "tensor_parallel"),
    Case("gpt-nano f32", "sequence_parallel", "sequence_parallel", EIGHT, EIGHT),
    Case("gpt-nano f32", "vocab_parallel", "vocab_parallel"),
    Case("gpt-nano f32", "megatron(2, 4)", "dp 2 × tp 4"),
    Case("gpt-nano f32", "megatron(2, 4, vocab=False, sequence=True)", "dp 2 × tp 4, sequence", EIGHT, EIGHT),
    # 12 gradients and parameters; the loss
    Case(MLP, "zero1", "zero1", ONCE, {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1}, sharded=True),
    # forward all parameters, which combine; backward again the kernels whose inputs need gradients, one by one, as the
    # cotangents come. (XLA's CPU backend keeps no fences and merges the second with the first.)
    Case(MLP, "zero3", "zero3", ONCE, {"reduce-scatter": 1, "all-gather": 6, "all-reduce": 1}, sharded=True, quick=True),
    Case("gpt-nano f32", "zero1", "zero1", {}, {"reduce-scatter": 1, "all-gather": 1}, sharded=True),
    Case("gpt-nano f32", "zero3", "zero3", {}, {"reduce-scatter": 1}, sharded=True),
    Case("gpt-nano f32", "megatron(2, 4, zero=1)", "dp 2 × tp 4, zero1", {}, {"reduce-scatter": 1}),
    Case("gpt-nano f32", "megatron(2, 4, zero=3)", "dp 2 × tp 4, zero3", {}, {"reduce-scatter": 1}),
    # grouped queries, rotary positions, a head of its own, and a state in nnx
    Case("llama-nano f32", "tensor_parallel", "tensor_parallel", quick=True),
    Case("llama-nano f32", "sequence_parallel", "sequence_parallel"),
    Case("llama-nano f32", "vocab_parallel", "vocab_parallel"),
    Case("llama-nano f32", "megatron(2, 4)", "dp 2 × tp 4"),
    Case("llama-nano f32", "zero3", "zero3", {}, {"reduce-scatter": 1}, sharded=True),
    Case("moe-nano f32, 2 layers", "expert_parallel", "expert_parallel", {"all-to-all": 8}, {"all-to-all": 8}, quick=True),
    Case("gpt-nano bf16 compute", "data_parallel", "data_parallel", wider=True),
    Case("gpt-nano bf16 compute", 'data_parallel(reduce_dtype="bfloat16")', "data_parallel, added in bf16"),
    Case("gpt-nano bf16 compute", "tensor_parallel", "tensor_parallel"),
    Case("gpt-mini f32", "data_parallel", "data_parallel"),
    Case("gpt-mini f32", "megatron(4, 2)", "dp 4 × tp 2"),
]
# fmt: on
MICROBATCHES = 8
EACH = {"reduce-scatter": 12}
ACCUMULATED = [  # 12 gradients and parameters; the loss is all-reduced once
    Accumulated("data_parallel", {}, {"all-reduce": 13}, {"all-reduce": 2}),
    Accumulated("zero1", {}, ONCE, {"reduce-scatter": 1, "all-gather": 1}),
    Accumulated("zero2", EACH, {"all-gather": 12, "all-reduce": 1}, {"reduce-scatter": MICROBATCHES, "all-gather": 1}),
    Accumulated(
        "zero3",
        {**EACH, "all-gather": 12},
        {"all-reduce": 1},
        {"reduce-scatter": MICROBATCHES, "all-gather": MICROBATCHES},
        again=True,
    ),
]

AXIAL = {  # step -> how the names begin of what a block's forward pass makes
    "evoformer-nano f32": ("stack/block_0/",),
    "evoformer-nano f32, stacked": ("stack/blocks.", "stack/scan:carry"),
}
AXIAL_BOUNDS = {("all_to_all",): 6, ("all_gather", "reduce_scatter"): 6, ("all_reduce",): 0}

INTERLACED = ("mbart-nano f32", "mbart-nano f32, 257 words")
STAGES = 4


def rows(quick: bool, target: str | None = None) -> Iterator[Row]:
    from jscaler.report.targets import described_devices

    if target:  # without a GPU to try them on, XLA chooses Triton tiles for a matmul that it then cannot compile
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    if quick:
        compile_fast()
    devices = described_devices(target) if target else jax.devices()
    if len(devices) != DEVICES:
        raise SystemExit(f"the cases are of {DEVICES} devices, the cluster has {len(devices)}; give one like 8xH100-80GB")
    steps: dict[str, Step] = {}
    sent: dict[tuple[str, str], dict[str, float]] = {}
    for case in CASES:
        if case.quick or not quick:
            if case.step not in steps:
                steps[case.step] = STEPS[case.step]()
            yield from case_rows(case, steps[case.step], devices, target, sent)
    for step, block in AXIAL.items():
        if not (target or (quick and "stacked" in step)):
            yield from axial_rows(step, block, devices)
    for step in INTERLACED:
        if not (target or (quick and "words" in step)):
            yield from interlaced_rows(step, devices[:STAGES])
    for accumulated in ACCUMULATED[-1:] if quick else ACCUMULATED:
        yield from accumulated_rows(accumulated, steps[MLP], devices, target)


def case_rows(
    case: Case, made: Step, devices: Sequence[Any], target: str | None, sent: dict[tuple[str, str], dict[str, float]]
) -> Iterator[Row]:
    """A row per kind of collective, and one per promise; ``sent`` keeps each case's bytes by kind."""
    from jscaler.comparison import twin
    from jscaler.report.hlo import Totals, totals

    fun, args = made
    where = {"case": case.step, "plan": case.shown, "target": target or f"cpu:{DEVICES}"}
    lowered = jscaler.parallelize(case.plan, devices=devices, donate_argnums=0)(fun).lower(*args)
    texts = lowered.compile().as_text(), twin(lowered).as_text()
    ours, theirs = map(totals, texts)
    mine, gspmd = map(sent_by_kind, texts)
    sent[case.step, case.shown] = mine
    none = Totals(0, 0, 0)
    for op in sorted({*ours, *theirs}):
        own = ours.get(op, none)
        counts = {"tensors": own.arrays, "launches": own.count, "gspmd_tensors": theirs.get(op, none).arrays}
        yield {**where, "op": op, **counts, "sent": round(mine.get(op, 0)), "gspmd_sent": round(gspmd.get(op, 0))}
    for op, count in (case.launches if target else case.tensors).items():
        what, found = ("launches", ours.get(op, none).count) if target else ("tensors", ours.get(op, none).arrays)
        yield {**where, "op": f"{op}: {what} to be {count}", what: found, "value": abs(found - count), "bound": 0}
    if case.shown == "data_parallel":
        least = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(parameters(args[0])))
        beyond = [sum(t.nbytes for t in side.values()) - least for side in (ours, theirs)]
        row = {**where, "op": "payload beyond the parameters' bytes", "sent": beyond[0], "gspmd_sent": beyond[1]}
        yield {**row, "value": beyond[0], "bound": SCALARS}
    if case.sharded:
        leaves = jax.tree.leaves(parameters(args[0]))
        least = sum(math.prod(p.shape) * p.dtype.itemsize for p in leaves)
        found = mine["reduce-scatter"], mine["all-gather"]
        row = {**where, "op": "reduce-scatter, beyond one of the parameters' bytes"}
        yield {**row, "sent": found[0], "value": abs(found[0] - least * (1 - 1 / DEVICES)), "bound": 0}
        row = {**where, "op": "all-gather, in that of the parameters' bytes"}
        yield {**row, "sent": round(found[1] / (least * (1 - 1 / DEVICES)), 4)}
        scalars = ours.get("all-reduce", none)
        row = {**where, "op": "all-reduce: no more than a float for each parameter and two"}
        yield {**row, "tensors": scalars.arrays, "value": scalars.nbytes, "bound": 4 * (len(leaves) + 2)}
    if case.as_much_as:
        whole = sent[case.step, case.as_much_as]["all-reduce"]
        more = mine["reduce-scatter"] + mine["all-gather"] - whole
        row = {**where, "op": f"reduce-scatter + all-gather, beyond the all-reduces of {case.as_much_as}"}
        yield {**row, "sent": round(more), "value": abs(more), "bound": 0}
    ratio = sum(mine.values()) / sum(gspmd.values())
    row = {**where, "op": "all, ratio to GSPMD", "sent": round(ratio, 4), "gspmd_sent": 1.0}
    if target and case.wider:
        yield {**row, "op": "all, ratio to GSPMD, which adds in bfloat16"}
    else:
        yield {**row, "value": ratio, "bound": 1.02}


def axial_rows(step: str, block: tuple[str, ...], devices: Sequence[Any]) -> Iterator[Row]:
    """A row for each collective in a block's forward pass, as planned, and one per bound."""
    fun, args = STEPS[step]()
    plan = jscaler.parallelize("dap(dp=2)", devices=devices)(fun).lower(*args).plan
    counts = dict.fromkeys(AXIAL_BOUNDS, 0)
    where = {"case": step, "plan": "dap(dp=2)", "target": f"cpu:{len(devices)}"}
    for adapt in plan.program.adapters:
        name = adapt.tensor.name
        if name.startswith(block) and "@" not in name:  # behind which stand loops of the backward pass
            for kind, sent in adapt.sent(adapt.tensor.itemsize):
                counts.update({kinds: n + (kind in kinds) for kinds, n in counts.items()})
                yield {**where, "op": f"{kind} of {name}", "tensors": 1, "sent": round(sent)}
    for kinds, bound in AXIAL_BOUNDS.items():
        row = {**where, "op": f"{' + '.join(kinds)}, of a block's forward", "tensors": counts[kinds]}
        yield {**row, "value": counts[kinds], "bound": bound}


def interlaced_rows(step: str, devices: Sequence[Any]) -> Iterator[Row]:
    """A row for each collective of a step, and for each tensor that the ends and the stages hand each other, as planned."""
    fun, args = STEPS[step]()
    state, batch = args
    shown = f"interlaced({STAGES}, {STAGES})"
    report = jscaler.parallelize(shown, devices=devices)(fun).lower(*args).plan.report
    where = {"case": step, "plan": shown, "target": f"cpu:{STAGES}"}
    for move in (move for moves in (*(row.moves for row in report.ops), report.results) for move in moves):
        for kind, (count, sent) in move.moved.items():
            yield {**where, "op": f"{kind} of {_of_whole(move.tensor)}", "tensors": count, "sent": round(sent)}
    for one in report.crossings:
        if one.times > 1 and STAGES in (len(one.source), len(one.target)):
            ends = "to all devices" if len(one.target) == STAGES else "from all devices"
            yield {**where, "op": f"{_of_whole(one.tensor)}, {ends}", "tensors": one.times, "sent": one.nbytes}
    words, hidden = state.params["embed"]["embedding"].shape
    tokens = 4 * batch["tokens"].size  # bytes of one number for each; both texts are looked up, and one has logits
    least = 2 * (1 - 1 / STAGES) * ((2 * 2 + 2) * hidden + 3) * tokens
    found = report.total["all_reduce"][1]
    row = {**where, "op": "all_reduce, beyond the closed form of look-ups and logits", "sent": round(found - least)}
    yield {**row, "value": abs(found - least), "bound": SCALARS}
    exchanged = report.total.get("all_to_all", (0, 0.0))[1]
    part = -(-words // STAGES) * hidden * 4  # bytes of a table's part, padded to the largest
    row = {**where, "op": "all_to_all, in parts of the table", "sent": exchanged / (part * (1 - 1 / STAGES))}
    yield {**row, "value": row["sent"], "bound": 2 if words % STAGES else 0}


def _of_whole(name: str) -> str:
    return name.replace("@microbatch:part", "")


def accumulated_rows(case: Accumulated, made: Step, devices: Sequence[Any], target: str | None) -> Iterator[Row]:
    """A row per kind of collective and place: tensors and bytes, held to what they are to be.

    On a CUDA target, all-reduces combine into one array, whose tensors are not to be told apart.
    """
    from jscaler.report.hlo import collectives

    fun, args = made
    lowered = jscaler.parallelize(f"accumulate({MICROBATCHES}, {case.plan}())", devices=devices, donate_argnums=0)(fun)
    found = collectives(lowered.lower(*args).compile().as_text())
    leaves = jax.tree.leaves(parameters(args[0]))
    total = sum(math.prod(p.shape) * p.dtype.itemsize for p in leaves)
    kernels = [p for p in leaves if len(p.shape) == 2]
    where = {"case": MLP, "plan": f"accumulate({MICROBATCHES}, {case.plan})", "target": target or f"cpu:{DEVICES}"}
    again = kernels[1:] if case.again and target else []
    for kind in sorted({*case.inside, *case.outside, *(one.kind for one in found)}):
        for place, expected in (("inside", case.inside), ("outside", case.outside)):
            own = [one for one in found if one.kind == kind and (one.times > 1) == (place == "inside")]
            count = sum(one.arrays for one in own)
            want = expected.get(kind, 0) + (len(again) if (place, kind) == ("inside", "all-gather") else 0)
            if own or want:
                want = min(want, 1) if target and kind == "all-reduce" else want
                row = {**where, "op": f"{kind}, {place} of the loop: tensors to be {want}", "tensors": count}
                yield {**row, "launches": len(own), "value": abs(count - want), "bound": 0}
        sent = sum(one.times * one.sent for one in found if one.kind == kind)
        more = MICROBATCHES * sum(math.prod(p.shape) * p.dtype.itemsize for p in again) if kind == "all-gather" else 0
        least = (case.shares.get(kind, 0) * total + more) * (1 - 1 / DEVICES)
        row = {**where, "op": f"{kind}: bytes beyond the closed form", "sent": round(sent)}
        yield {**row, "value": abs(sent - least), "bound": SCALARS}


def sent_by_kind(text: str) -> dict[str, float]:
    """Kind -> bytes that a device sends."""
    from jscaler.report.hlo import collectives

    table: dict[str, float] = {}
    for one in collectives(text):
        table[one.kind] = table.get(one.kind, 0.0) + one.times * one.sent
    return table


def parameters(state: Any) -> Any:
    """The parameters in a train state, or first in a tuple, where nnx has its model."""
    return state[0] if isinstance(state, tuple) else state.params


if __name__ == "__main__":
    options = {"target": {"metavar": "CLUSTER", "help": "compile for a described cluster like 8xH100-80GB, run nothing"}}
    main("collectives", __doc__ or "", COLUMNS, rows, devices=DEVICES, options=options)
