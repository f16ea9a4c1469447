"""Does a plan's predicted memory hold? ``jscaler.cost`` against what XLA's buffers for a CUDA cluster take.

``predicted_peak`` is the cost query's, which compiles nothing: bytes per device of the step's arguments, and of all that
lives at the worst moment. ``compiled_peak`` is the compiled program's own account for the described cluster: arguments,
results that take no argument's buffer, and temporaries. Of a pipeline both are those of the fullest stage over the table
of its blocks, and ``stages`` has the ratio of each. No GPU is needed, but the extra ``aot`` is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main

COLUMNS = ("plan", "model", "target", "predicted_peak", "compiled_peak", "ratio", "stages", "seconds")
# without a GPU to try them on, XLA chooses Triton tiles for a matmul that it then cannot compile
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
BF16 = {"dtype": jnp.bfloat16}


@dataclass(frozen=True)
class Case:
    """A plan on as many devices of the target as it is for.

    Attributes:
        plan: as on the command line.
        model: makes the step and the shapes of its arguments.
        shown: the model's name in the table.
        target: another cluster than the one asked for.
    """

    plan: str
    devices: int
    model: Callable[[], tuple[Any, tuple[Any, ...]]]
    shown: str
    quick: bool = False
    target: str | None = None


def gpt(batch: int = 8, size: str = "125m", **changes: Any) -> tuple[Any, tuple[Any, ...]]:
    """GPT 125M with dropout, clipping and AdamW, its arguments as shapes; ``changes`` are those of its sizes."""
    from models.gpt import GPT, SIZES
    from models.training import make_optimizer, make_state, train_step

    config = dataclasses.replace(SIZES[size], **changes)
    state = jax.eval_shape(lambda: make_state(GPT(config), config.sequence, make_optimizer()))
    return train_step, (state, tokens(batch, config.sequence))


def llama(batch: int = 8, size: str = "1b", **changes: Any) -> tuple[Any, tuple[Any, ...]]:
    """Llama 1B on 2,048 tokens with clipping and AdamW, as `gpt`."""
    from models import make_model
    from models.recipes import RECIPES
    from models.training import make_optimizer

    model, config = make_model("llama", size, **{"sequence": 2048, **changes})
    state = jax.eval_shape(lambda: RECIPES["llama"].make_state(model, config, make_optimizer(), jax.random.key(0)))
    return RECIPES["llama"].step, (state, tokens(batch, config.sequence))


def moe(batch: int = 16) -> tuple[Any, tuple[Any, ...]]:
    """A mixture of eight experts in four layers, with its load-balancing loss."""
    from models.moe import SIZES, MoE
    from models.training import balanced_train_step, make_optimizer, make_state

    sizes = {"hidden": 512, "layers": 4, "heads": 8, "sequence": 512, "vocabulary": 8192}
    config = dataclasses.replace(SIZES["mini"], **sizes)
    state = jax.eval_shape(lambda: make_state(MoE(config), config.sequence, make_optimizer()))
    return balanced_train_step, (state, tokens(batch, config.sequence))


def tokens(batch: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of text."""
    return dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct((batch, sequence), jnp.int32))


LARGE = {"stacked": True, "remat": True}
FP16 = {"dtype": jnp.float16}
V100 = "4x8xV100-32GB"
CASES = [
    Case("single", 1, lambda: gpt(stacked=True), "gpt-125m f32, stacked"),
    Case("single", 1, lambda: gpt(stacked=True, remat=True), "gpt-125m f32, stacked, remat", quick=True),
    Case("single", 1, lambda: gpt(layers=4, **BF16), "gpt-125m bf16, 4 layers"),
    Case("data_parallel", 8, lambda: gpt(32, layers=6), "gpt-125m f32, 6 layers, batch 32"),
    Case("tensor_parallel", 4, lambda: gpt(stacked=True), "gpt-125m f32, stacked", quick=True),
    Case("sequence_parallel", 4, lambda: gpt(stacked=True, **BF16), "gpt-125m bf16, stacked"),
    Case("vocab_parallel", 8, lambda: gpt(layers=2), "gpt-125m f32, 2 layers"),
    Case("megatron(dp=2, tp=4)", 8, lambda: gpt(layers=4), "gpt-125m f32, 4 layers"),
    Case("megatron(dp=2, tp=4)", 8, lambda: gpt(16, stacked=True, remat=True, **BF16), "gpt-125m bf16, stacked, remat"),
    Case("megatron(dp=2, tp=4, sequence=True)", 8, lambda: gpt(stacked=True), "gpt-125m f32, stacked"),
    Case("zero1", 8, lambda: gpt(stacked=True), "gpt-125m f32, stacked"),
    Case("zero3", 8, lambda: gpt(stacked=True), "gpt-125m f32, stacked"),
    Case("expert_parallel", 8, moe, "moe f32, 4 layers of 8 experts"),
    Case("accumulate(4, data_parallel())", 2, lambda: gpt(32, stacked=True), "gpt-125m f32, stacked, batch 32"),
    Case("accumulate(4, zero2())", 4, lambda: gpt(32, stacked=True, **BF16), "gpt-125m bf16, stacked, batch 32"),
    Case("recompute_layers()", 1, lambda: gpt(layers=6), "gpt-125m f32, 6 layers"),
    Case("recompute_layers(data_parallel())", 4, lambda: gpt(32, layers=6), "gpt-125m f32, 6 layers, batch 32"),
    Case("co_shard(4)", 1, lambda: gpt(2, stacked=True, **BF16), "gpt-125m bf16, stacked, batch 2"),
    Case("co_shard(4)", 1, lambda: gpt(2, layers=4), "gpt-125m f32, 4 layers, batch 2"),
    Case("accumulate(2, co_shard(2, plan=tensor_parallel()))", 2, lambda: gpt(layers=4), "gpt-125m f32, 4 layers"),
    Case("single", 1, lambda: llama(2, layers=4, **BF16), "llama-1b bf16, 4 layers, batch 2"),
    Case("tensor_parallel", 8, lambda: llama(**LARGE, **BF16), "llama-1b bf16, stacked, remat"),
    Case("zero3", 8, lambda: llama(**LARGE, **BF16), "llama-1b bf16, stacked, remat"),
    Case("co_shard(4)", 1, lambda: llama(2, **LARGE, **BF16), "llama-1b bf16, stacked, remat, batch 2"),
    Case("vocab_parallel", 8, lambda: llama(size="8b", layers=2, **BF16), "llama-8b bf16, 2 layers, its own head"),
    Case("megatron(dp=2, tp=16)", 32, lambda: llama(**LARGE, **FP16), "llama-1b fp16, stacked, remat", target=V100),
    Case("megatron(dp=1, tp=2, pp=4, microbatches=8)", 8, lambda: llama(16, **LARGE, **BF16),
         "llama-1b bf16, stacked, remat, batch 16"),
    Case("pipeline(2, 4)", 2, lambda: gpt(layers=4), "gpt-125m f32, 4 layers", quick=True, target="2xH100-80GB"),
    *(
        Case(plan, 8, functools.partial(gpt, 16, "1.3b", **LARGE, **BF16), "gpt-1.3b bf16, stacked, remat, batch 16")
        for plan in (
            "megatron(dp=1, tp=2, pp=4, microbatches=8)", "megatron(dp=1, tp=2, pp=4, microbatches=8, schedule='gpipe')",
            "pipeline(4, 8, plan=zero3())",
        )
    ),
    Case("megatron(dp=2, tp=4, pp=4, microbatches=16)", 32, functools.partial(gpt, 32, "1.3b", **LARGE, **FP16),
         "gpt-1.3b fp16, stacked, remat, batch 32", target=V100),
    Case("megatron(dp=1, tp=2, pp=4, microbatches=8)", 8, functools.partial(gpt, 16, "15b", **LARGE, **BF16),
         "gpt-15b bf16, stacked, remat, batch 16"),
    Case("megatron(dp=1, tp=8, pp=4, microbatches=16)", 32, functools.partial(gpt, 32, "15b", **LARGE, **FP16),
         "gpt-15b fp16, stacked, remat, batch 32", target=V100),
]  # fmt: skip


def rows(quick: bool, target: str, plan: str, model: str) -> Iterator[Row]:
    for case in CASES:
        if (case.quick or not quick) and plan in case.plan and model in case.shown:
            yield measure(case, case.target or target)


def measure(case: Case, target: str) -> Row:
    from jscaler.report.targets import described_devices

    fun, args = case.model()
    devices = described_devices(target)[: case.devices]
    lowered = jscaler.parallelize(case.plan, devices=devices, donate_argnums=0)(fun).lower(*args)
    found = jscaler.cost(lowered, None, target)
    row = {"plan": f"{case.plan} on {case.devices}", "model": case.shown, "target": target, "seconds": found.seconds.total}
    peak, ratios = _staged(lowered, found, target) if len(lowered.plan.blocks) > 1 else _alone(lowered, found)
    row |= {"predicted_peak": found.memory.peak, "compiled_peak": peak, "ratio": found.memory.peak / peak}
    row |= {"stages": " ".join(f"{ratio:.3f}" for ratio in ratios) if len(ratios) > 1 else ""}
    return {**row, "value": max(abs(ratio - 1) for ratio in ratios), "bound": 0.15}


def _alone(lowered: Any, found: Any) -> tuple[int, list[float]]:
    """The peak of the program that all devices run, and how the prediction compares."""
    compiled = lowered.lowered.compile(compiler_options=OPTIONS).memory_analysis()
    peak = (
        compiled.argument_size_in_bytes
        + compiled.output_size_in_bytes
        - compiled.alias_size_in_bytes
        + compiled.temp_size_in_bytes
    )
    return peak, [found.memory.peak / peak]


def _staged(lowered: Any, found: Any, target: str) -> tuple[int, list[float]]:
    """The same of the fullest stage, and of every stage."""
    report = lowered.compile(target=target)
    pairs = zip(found.by_devices, report.by_devices, strict=True)
    return report.memory.peak, [guess.memory.peak / one.memory.peak for guess, one in pairs]


if __name__ == "__main__":
    known = {"metavar": "CLUSTER", "default": "8xH100-80GB", "help": "a described cluster of at least 8 devices"}
    chosen = {"default": "", "metavar": "TEXT", "help": "only plans that hold this text"}
    models = {"default": "", "metavar": "TEXT", "help": "only models whose description holds this text"}
    main("predicted", __doc__ or "", COLUMNS, rows, options={"target": known, "plan": chosen, "model": models})
