"""What `bench.parity` compares: small models with their losses and batches, and the plans that apply to each."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler

STEPS = 5
DTYPES = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model's loss on a batch.

    Attributes:
        loss: ``loss(params, rest, batch, key) -> (loss, rest)``; ``rest`` is state that is not trained.
        params, rest: at the start.
        batches: one per step.
        alone: the loss of one device where plans run micro-batches alone, if it is another; its last argument says between
            how many devices the batch is split, each of which owns a block of it and takes its parts from there.
    """

    loss: Callable[[Any, Any, Any, jax.Array], Any]
    params: Any
    batches: list[Any]
    rest: Any = ()
    alone: Callable[..., Any] | None = None

    def train_step(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """``train_step(state, batch, key) -> (state, loss)`` for a state as `state` makes it."""

        def step(state: Any, batch: Any, key: jax.Array) -> Any:
            params, moments, rest = state
            loss_of = jscaler.value_and_grad(lambda p: self.loss(p, rest, batch, key), has_aux=True)
            (loss, rest), gradients = loss_of(params)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments, rest), loss

        return step

    def state(self, optimizer: optax.GradientTransformation) -> Any:
        return self.params, optimizer.init(self.params), self.rest


@dataclass(frozen=True)
class Run:
    """A plan on a number of devices, of which ``blocks`` split the batch; ``quick`` ones are part of the quick form."""

    plan: Any
    devices: int
    quick: bool = False
    blocks: int = 1

    @property
    def name(self) -> str:
        shown = self.plan if isinstance(self.plan, str) else self.plan.__name__
        return shown.rsplit(".py:", 1)[-1]


def kinds(dtype: Any) -> dict[str, Any]:
    """What a model computes in and what it remembers: bfloat16 computes, float32 remembers."""
    return {"dtype": dtype, "param_dtype": jnp.float32 if dtype == jnp.bfloat16 else dtype}


def cast(tree: Any, dtype: Any) -> Any:
    """The floating leaves of ``tree`` in what a model of ``dtype`` remembers."""
    stored = kinds(dtype)["param_dtype"]
    return jax.tree.map(lambda x: x.astype(stored) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()


def masked_cross_entropy(logits: Any, labels: Any) -> jax.Array:
    """The mean over the tokens that count; micro-batches and devices have unequal numbers of them."""
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels)
    counts = (labels % 4 != 0).astype(losses.dtype)
    return jnp.sum(losses * counts) / jnp.maximum(jnp.sum(counts), 1)


def text_batches() -> list[Any]:
    from models.text import batch_at, load_bytes

    return [batch_at(load_bytes(), i, 8, 16) for i in range(STEPS)]


def gpt(dtype: Any, loss_of: Callable[..., jax.Array] = cross_entropy, **changes: Any) -> Case:
    """The linen GPT; ``changes`` may stack its layers."""
    from models.gpt import GPT, GPTConfig

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "sequence": 16, **changes}
    model, batches = GPT(GPTConfig(**sizes, **kinds(dtype))), text_batches()
    params = GPT(GPTConfig(**sizes)).init(jax.random.key(0), batches[0]["tokens"])["params"]

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        logits = model.apply({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
        return loss_of(logits, batch["labels"]), rest

    return Case(loss, cast(params, dtype), batches)


def gpt_of_masters(dtype: Any, **changes: Any) -> Case:
    """The linen GPT, whose parameters are cast for its loss to what it computes in; norms compute in 32 bits at least."""
    from models.master import low

    case = gpt(dtype, **changes)
    return dataclasses.replace(case, loss=lambda params, *args: case.loss(low(params, dtype), *args))


def gpt_nnx(dtype: Any, **changes: Any) -> Case:
    """The GPT in nnx; what is not trained are the counters of its dropout. ``changes`` may stack its layers."""
    from models.gpt import GPTConfig
    from models.gpt_nnx import GPT

    return nnx_text(GPT, GPTConfig, dtype, {"hidden": 32, "layers": 2, "heads": 4, "sequence": 16, **changes})


def llama(dtype: Any, **changes: Any) -> Case:
    """The Llama, whose queries are in groups; ``changes`` may stack its layers, or tie its head."""
    from models.llama import Llama, LlamaConfig

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "groups": 2, "units": 48, "sequence": 16, **changes}
    return nnx_text(Llama, LlamaConfig, dtype, sizes)


def nnx_text(make: Any, config: Any, dtype: Any, sizes: dict[str, Any]) -> Case:
    """A language model in nnx, ``make(config, rngs)``."""
    from flax import nnx

    model = make(config(**sizes, **kinds(dtype)), nnx.Rngs(0))
    model.train()
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = cross_entropy(model(batch["tokens"]), batch["labels"])
        return value, nnx.split(model, nnx.Param, ...)[2]

    exact = make(config(**sizes), nnx.Rngs(0))
    return Case(loss, cast(nnx.split(exact, nnx.Param, ...)[1], dtype), text_batches(), rest)


def moe(dtype: Any) -> Case:
    """The mixture of experts, trained on its load-balancing loss too."""
    from models.moe import MoE, MoEConfig

    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "sequence": 16, "experts": 8}
    model, batches = MoE(MoEConfig(**sizes, **kinds(dtype))), text_batches()
    params = MoE(MoEConfig(**sizes)).init(jax.random.key(0), batches[0]["tokens"])["params"]

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        variables, rngs = {"params": params}, {"dropout": key}
        logits, sown = model.apply(variables, batch["tokens"], train=True, rngs=rngs, mutable=["losses"])
        return cross_entropy(logits, batch["labels"]) + sum(jax.tree.leaves(sown["losses"])), rest

    return Case(loss, cast(params, dtype), batches)


def mbart(dtype: Any, **changes: Any) -> Case:
    """An encoder and a decoder, and one table of words; ``changes`` may stack their layers."""
    from models.mbart import MBart, MBartConfig
    from models.text import load_bytes, pair_at

    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "sequence": 16, **changes}
    batches = [pair_at(load_bytes(), i, 8, 16) for i in range(STEPS)]
    model, texts = MBart(MBartConfig(**sizes, **kinds(dtype))), (batches[0]["source"], batches[0]["tokens"])
    params = MBart(MBartConfig(**sizes)).init(jax.random.key(0), *texts)["params"]

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        logits = model.apply({"params": params}, batch["source"], batch["tokens"], train=True, rngs={"dropout": key})
        return cross_entropy(logits, batch["labels"]), rest

    return Case(loss, cast(params, dtype), batches)


def convnet(dtype: Any) -> Case:
    """Convolutions with batch normalisation; what is not trained are its running statistics."""
    from models.convnet import ConvConfig, ConvNet

    model = ConvNet(ConvConfig(hidden=8, layers=2, image=16, **kinds(dtype)))
    draws = np.random.default_rng(0)
    shape = (8, 16, 16, 3)
    batches = [{"images": draws.normal(size=shape) + 1, "labels": draws.integers(0, 10, 8)} for _ in range(STEPS)]
    variables = ConvNet(ConvConfig(hidden=8, layers=2, image=16)).init(jax.random.key(0), jnp.zeros(shape, jnp.float32))

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        images = batch["images"].astype(kinds(dtype)["param_dtype"])
        logits, moved = model.apply({"params": params, "batch_stats": rest}, images, train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["labels"]), moved["batch_stats"]

    return Case(loss, cast(variables["params"], dtype), batches, cast(variables["batch_stats"], dtype))


def convnet_alone(dtype: Any, microbatches: int = 2) -> Case:
    """The same, whose plans normalise each micro-batch alone; running statistics go from one to the next."""
    case = convnet(dtype)

    def alone(params: Any, rest: Any, batch: Any, key: jax.Array, blocks: int) -> Any:
        def part_of(x: Any, i: int) -> jax.Array:
            rows = jnp.reshape(x, (blocks, microbatches, -1, *x.shape[1:]))[:, i]
            return rows.reshape(-1, *x.shape[1:])

        total = 0.0
        for i in range(microbatches):
            part = jax.tree.map(functools.partial(part_of, i=i), batch)
            loss, rest = case.loss(params, rest, part, key)
            total += loss
        return total / microbatches, rest

    return dataclasses.replace(case, alone=alone)


def evoformer(dtype: Any, **changes: Any) -> Case:
    """The smallest Evoformer, one block, with dropout; ``changes`` may stack it, and let it recycle."""
    from models.alignments import alignment_at
    from models.evoformer import SIZES, Evoformer
    from models.training import evoformer_loss

    config = dataclasses.replace(SIZES["nano"], **{"layers": 1, "recycles": 0, **changes})
    batches = [alignment_at(i, 4, config.sequences, config.residues, config.bins) for i in range(STEPS)]
    params = Evoformer(config).init(jax.random.key(0), batches[0]["msa"], batches[0]["target"])["params"]
    model, draws = Evoformer(dataclasses.replace(config, **kinds(dtype))), np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: p + 0.1 * draws.normal(size=p.shape), params
    )  # zeros, with which blocks begin, hide much

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        return evoformer_loss(model.apply, params, batch, key), rest

    return Case(loss, cast(params, dtype), batches)


def swin(dtype: Any) -> Case:
    """A Swin of one stage, two pairs of blocks."""
    from models.images import stripes_at
    from models.swin import Swin, SwinConfig

    sizes: dict[str, Any] = {"hidden": 16, "heads": 4, "depths": (4,), "window": 2, "image": 8, "patch": 2, "classes": 3}
    model, batches = Swin(SwinConfig(**sizes, **kinds(dtype))), [stripes_at(i, 8, 8, 3) for i in range(STEPS)]
    params = Swin(SwinConfig(**sizes)).init(jax.random.key(0), batches[0]["images"])["params"]

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        images = batch["images"].astype(kinds(dtype)["param_dtype"])
        return cross_entropy(model.apply({"params": params}, images), batch["labels"]), rest

    return Case(loss, cast(params, dtype), batches)


def mlp(dtype: Any) -> Case:
    from models.mlp import MLP

    model = MLP(hidden=32, layers=3, out=8, dropout=0.2, **kinds(dtype))
    draws = np.random.default_rng(0)
    batches = [{"x": draws.normal(size=(16, 12)), "y": draws.integers(0, 8, 16)} for _ in range(STEPS)]
    params = MLP(hidden=32, layers=3, out=8).init(jax.random.key(0), jnp.zeros((1, 12), jnp.float32))["params"]

    def loss(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
        x = batch["x"].astype(kinds(dtype)["param_dtype"])
        logits = jnp.asarray(model.apply({"params": params}, x, train=True, rngs={"dropout": key}))
        return cross_entropy(logits.astype(jnp.promote_types(dtype, jnp.float32)), batch["y"]), rest

    return Case(loss, cast(params, dtype), batches)


def one_mlp(graph: Any, devices: np.ndarray) -> None:
    """Hidden units of the first two layers over the devices, everything else copied."""
    for layer, dim in (("layer_0", 1), ("layer_1", 0)):
        op = graph[f"{layer}/dot"]
        graph.op_assign(graph.op_trans(op, jscaler.Split((f"{layer}/kernel", dim), devices.size)), devices)


def tied_two_ways(graph: Any, devices: np.ndarray) -> None:
    """The tied embedding is looked up by parts of the vocabulary, and makes logits by parts of the hidden units."""
    for path, dim in (("embed/gather", 0), ("embed.attend/dot", 1)):
        graph.op_assign(graph.op_trans(graph[path], jscaler.Split(("embed/embedding", dim), devices.size)), devices)


DOCS = Path(__file__).parent.parent / "docs"
FIRST = '{"*/layer_0/kernel": 1}'
CASES: dict[str, tuple[Callable[[Any], Case], list[Run]]] = {
    "mlp": (
        mlp,
        [
            Run("single", 1),
            Run("data_parallel", 8),
            Run(one_mlp, 4),
            Run(f"tensor_parallel({FIRST})", 8),
            Run(f'sequence_parallel({FIRST}, {{"batch/x": 0}})', 8),
            Run(f"megatron(dp=2, tp=4, columns={FIRST})", 8, quick=True),
            Run("zero1", 8, quick=True),
            Run("zero3", 8),
            Run(f"megatron(dp=2, tp=4, columns={FIRST}, zero=1)", 8),
            Run(f"megatron(dp=4, tp=2, columns={FIRST}, zero=3)", 8),
            Run("accumulate(4, data_parallel())", 4, quick=True),
            Run("accumulate(4, zero2())", 4),
            Run(f"accumulate(2, co_shard(4, on={FIRST}, loss=False))", 1),
        ],
    ),
    "linen GPT": (
        gpt,
        [
            Run("single", 1),
            Run(f"{DOCS / 'split_one_mlp.py'}:split_one_mlp", 4),
            Run("data_parallel", 2),
            Run("data_parallel", 8),
            Run("tensor_parallel", 4),
            Run("sequence_parallel", 4),
            Run("vocab_parallel", 8),
            Run(tied_two_ways, 4),
            Run("megatron(dp=2, tp=4)", 8),
            Run("megatron(dp=2, tp=4, sequence=True)", 8),
            Run("zero1", 8),
            Run("zero3", 8),
            Run("megatron(dp=2, tp=4, zero=1)", 8),
            Run("megatron(dp=4, tp=2, zero=3)", 8),
            Run("megatron(dp=2, tp=4, sequence=True, zero=1)", 8),
            Run("megatron(dp=4, tp=2, sequence=True, zero=3)", 8),
            Run("accumulate(4)", 1),
            Run("accumulate(2, megatron(dp=2, tp=2, sequence=True))", 4),
            Run("accumulate(4, zero3())", 2),
            Run("co_shard(4)", 1),
            Run("co_shard(2, plan=tensor_parallel())", 2),
            Run("accumulate(2, co_shard(2))", 1),
            Run("recompute_layers()", 1),
            Run("selective_recompute(tensor_parallel())", 4),
        ],
    ),
    "GPT, masked loss": (
        functools.partial(gpt, loss_of=masked_cross_entropy),
        [
            Run("data_parallel", 8),
            Run("megatron(dp=2, tp=2, sequence=True)", 4),
            Run("accumulate(4)", 1),
            Run("accumulate(4, data_parallel())", 2, quick=True),
            Run("accumulate(2, megatron(dp=2, tp=2, zero=2))", 4),
            Run("co_shard(2)", 1),
            Run("accumulate(2, co_shard(2, plan=tensor_parallel()))", 2),
        ],
    ),
    "nnx GPT": (
        gpt_nnx,
        [
            Run("data_parallel", 8),
            Run("tensor_parallel", 4),
            Run("sequence_parallel", 4),
            Run("vocab_parallel", 8),
            Run("megatron(dp=2, tp=4)", 8, quick=True),
            Run("megatron(dp=2, tp=4, sequence=True)", 8),
            Run("zero1", 8),
            Run("zero3", 8),
            Run("megatron(dp=2, tp=4, sequence=True, zero=1)", 8),
            Run("accumulate(2, co_shard(2, plan=tensor_parallel()))", 2),
        ],
    ),
    "Llama": (
        llama,
        [
            Run("data_parallel", 8),
            Run("tensor_parallel", 2),
            Run("vocab_parallel", 8),
            Run("megatron(dp=4, tp=2, sequence=True, zero=1)", 8, quick=True),
            Run("zero3", 8),
            Run("accumulate(2, co_shard(2))", 1),
        ],
    ),
    "stacked Llama with remat": (
        functools.partial(llama, stacked=True, remat=True, tied=True, layers=4),
        [
            Run("megatron(dp=2, tp=2, sequence=True, zero=3)", 4),
            Run("co_shard(2, plan=zero3())", 4),
            Run("accumulate(4, zero2())", 2),
        ],
    ),
    "stacked GPT with remat": (
        functools.partial(gpt, stacked=True, remat=True),
        [
            Run("single", 1),
            Run("data_parallel", 8),
            Run("tensor_parallel", 4),
            Run("sequence_parallel", 4),
            Run("vocab_parallel", 8),
            Run("megatron(dp=2, tp=4)", 8),
            Run("megatron(dp=2, tp=4, sequence=True)", 8, quick=True),
            Run("zero1", 8),
            Run("zero3", 8, quick=True),
            Run("megatron(dp=2, tp=4, zero=1)", 8),
            Run("megatron(dp=2, tp=2, sequence=True, zero=3)", 4),
            Run("megatron(dp=4, tp=2, sequence=True, zero=3)", 8),
            Run("accumulate(4, data_parallel())", 2),
            Run("accumulate(4, zero2())", 2),
            Run("co_shard(4)", 1),
            Run("accumulate(2, co_shard(2, plan=tensor_parallel()))", 2, quick=True),
            Run("co_shard(2, plan=megatron(dp=2, tp=2, sequence=True, zero=1))", 4),
            Run("co_shard(2, plan=zero3())", 4),
            Run("accumulate(2, co_shard(2, plan=zero2()))", 4),
            Run("recompute_layers(zero3(), 1)", 4),
        ],
    ),
    "conv + BatchNorm": (
        convnet,
        [
            Run("data_parallel", 8),
            Run("spatial", 4),
            Run("spatial(grid=(2, 2), dp=2)", 8, quick=True),
            Run("zero1", 8),
            Run("zero3", 8),
        ],
    ),
    "conv + BatchNorm, alone": (
        convnet_alone,
        [Run("accumulate(2, data_parallel(), per_microbatch='*/norm/*')", 2, blocks=2)],
    ),
    "MoE": (
        moe,
        [
            Run("data_parallel", 8),
            Run("expert_parallel", 8, quick=True),
            Run("tensor_parallel", 4),
            Run("megatron(dp=2, tp=4)", 8),
            Run("zero1", 8),
            Run("zero3", 8),
            Run("megatron(dp=2, tp=4, zero=3)", 8),
            Run("accumulate(2, expert_parallel())", 4),
        ],
    ),
    "mBART": (mbart, [Run("vocab_parallel", 8), Run("accumulate(2, data_parallel())", 2)]),
    "stacked mBART": (functools.partial(mbart, stacked=True), [Run("accumulate(4)", 1)]),
    "Evoformer": (
        evoformer,
        [
            Run("data_parallel", 4),
            Run("dap", 4, quick=True),
            Run("dap(dp=2)", 8),
            Run("recompute_layers(dap(), on='*/block_0')", 2),
        ],
    ),
    "stacked Evoformer that recycles": (
        functools.partial(evoformer, stacked=True, remat=True, layers=2, recycles=1),
        [Run("dap(dp=2)", 4)],
    ),
    "Swin": (swin, []),
    "linen GPT, 257 words": (functools.partial(gpt, vocabulary=257), []),
    "stacked GPT, 16-bit parameters": (functools.partial(gpt_of_masters, stacked=True, layers=4), []),
    # layers in one loop, of which stages take ranges: equal ones, and those of five layers on two and four stages
    "stacked GPT, 4 layers": (functools.partial(gpt, stacked=True, layers=4), []),
    "stacked GPT, 5 layers with remat": (functools.partial(gpt, stacked=True, remat=True, layers=5), []),
    "stacked nnx GPT": (functools.partial(gpt_nnx, stacked=True, layers=4), []),
}


def pipelines(first: int, inside: dict[str, int], more: str = "") -> list[Run]:
    """Stages of each inner plan, of so many devices: all pairs of model, schedule, stages and inner plan are in some row.

    Args:
        first: which row has which schedule and stages; another number for each model.
        more: arguments.
    """
    found = []
    for number, (plan, devices) in enumerate(inside.items(), first):
        schedule, stages = ("1f1b", "gpipe")[number % 2], (2, 4)[number // 2 % 2] if devices < 4 else 2
        blocks = 2 if plan.startswith(("dp=2", "data_parallel", "zero")) else 1
        if plan.startswith("dp="):
            name = f"megatron({plan}, pp=2, microbatches=2, schedule='{schedule}')"
            name = f"pipeline(2, 2, '{schedule}', plan=megatron({plan}){more})" if more else name
            found.append(Run(name, 2 * devices, blocks=blocks))
        else:
            own = f", plan={plan}" if plan else ""
            found.append(Run(f"pipeline({stages}, 2, '{schedule}'{own}{more})", stages * devices, blocks=blocks))
    return found


INNER = {
    "": 1, "tensor_parallel()": 2, "data_parallel()": 2, "zero1()": 2, "zero3()": 2, "recompute_layers()": 1,
    "co_shard(2)": 1, "dp=2, tp=2": 4, "dp=1, tp=4": 4,
}  # fmt: skip


def inner(columns: str, layers: str) -> dict[str, int]:
    """The same for a model whose columns and layers have no names that plans know."""
    return {
        "": 1, f"tensor_parallel({columns})": 2, "data_parallel()": 2, "zero1()": 2, "zero3()": 2,
        f"recompute_layers(on='{layers}')": 1, f"co_shard(2, on={columns}, loss=False)": 1,
        f"dp=2, tp=2, columns={columns}": 4, f"tensor_parallel(columns={columns})": 4,
    }  # fmt: skip


def rivals(layers: str = "", sequence: bool = True) -> list[Run]:
    """What the paper's plans are compared with: 3-D parallelism with all of Megatron-LM's choices, ZeRO, and schedules.

    Args:
        layers: the modules of layers, where they have no names that plans know.
        sequence: whether the model has one.
    """
    on = f", on='{layers}'" if layers else ""
    inside = f"recompute_layers(megatron(tp=2{', sequence=True' if sequence else ''}){on})"
    return [
        Run(f"pipeline(2, 2, plan={inside})", 4),
        Run("megatron(dp=2, tp=2, pp=2, zero=1, microbatches=2)", 8),
        Run("pipeline(2, 4, 'interleaved')", 2),
        Run("pipeline(2, 4, 'gpipe')", 2),
        Run("pipeline(2, 4)", 2),
        Run("pipeline(2, 4, 'chimera')", 2),
        Run("zero1", 4),
        Run("accumulate(2, zero2())", 4),
        Run("zero3", 4),
    ]


CO_SHARD = "co_shard(2, plan=megatron(dp=2, tp=2))"
ALONE = ", per_microbatch='*/norm/*'"
# Steps on several device groups: as many executables, so no rows of `bench.same_programs`.
PIPELINES: dict[str, list[Run]] = {
    "mlp": [
        Run("pipeline(2, 4)", 2, quick=True),
        Run("pipeline(2, 4, '1f1b+R')", 2),
        *pipelines(0, inner(FIRST, "layer_*")),
    ],
    "linen GPT": [
        *pipelines(1, INNER),
        Run("pipeline(2, 4, '1f1b+R', plan=tensor_parallel())", 4),
        Run(CO_SHARD, 4),
        Run(f"pipeline(2, 2, plan={CO_SHARD})", 8),
        Run("interlaced(2, 4, recompute=True)", 2),
    ],
    "linen GPT, 257 words": [
        Run("vocab_parallel", 4),
        Run("megatron(dp=2, tp=4, zero=3)", 8),
        Run("interlaced(2, 4, data_parallel())", 4),
    ],
    "GPT, masked loss": [Run("megatron(dp=2, tp=2, pp=2, microbatches=2)", 8), Run("pipeline(2, 4, 'gpipe')", 2)],
    "nnx GPT": pipelines(2, {plan.replace("layers()", "layers(on='0/blocks/*')"): n for plan, n in INNER.items()}),
    "Llama": pipelines(1, {"": 1, "tensor_parallel()": 2, "zero3()": 2, "dp=2, tp=2": 4}),
    "stacked Llama with remat": [
        *pipelines(2, {"": 1, "tensor_parallel()": 2, "zero1()": 2, "co_shard(2)": 1, "dp=2, tp=2": 4}),
        Run("interlaced(2, 4)", 2, quick=True),
        Run("pipeline(2, 4, 'zb_h1')", 2),
        Run("pipeline(2, 4, 'chimera')", 2),
    ],
    "conv + BatchNorm, alone": pipelines(3, inner('{"*/same_1/conv/kernel": 3}', "down_*"), ALONE),
    # its balancing loss and recompute together need two loops over micro-batches, of which one may span groups
    "MoE": [
        *pipelines(0, {plan: n for plan, n in INNER.items() if "recompute" not in plan}),
        Run("pipeline(2, 2, 'gpipe', plan=expert_parallel())", 4),
    ],
    "mBART": [
        Run("interlaced(2, 4)", 2, quick=True),
        Run("interlaced(4, 2)", 4),
        Run("interlaced(2, 2, data_parallel())", 4, blocks=2),
        Run("interlaced(2, 4, tensor_parallel(), recompute=True)", 4),
        Run("pipeline(4, 4)", 4),
        *rivals(),
    ],
    "stacked mBART": [
        Run("interlaced(2, 2, megatron(dp=2, tp=2))", 8, blocks=2),
        Run("interlaced(4, 4, recompute=True)", 4),
        Run("pipeline(2, 4, 'gpipe')", 2),
    ],
    "Evoformer": [Run("zero1", 4), Run("zero3", 4), Run("accumulate(2, zero2())", 2)],
    "Swin": [Run(CO_SHARD, 4), Run(f"pipeline(2, 2, plan={CO_SHARD})", 8), *rivals("stage_*/pair_*", sequence=False)],
    "stacked GPT, 16-bit parameters": [Run("accumulate(4, data_parallel())", 2), Run("pipeline(2, 4)", 2)],
    "stacked GPT, 4 layers": [
        *pipelines(1, INNER),
        Run("interlaced(2, 4)", 2),
        Run("pipeline(3, 2)", 3),
        *rivals()[:3],
        Run("pipeline(2, 4, 'chimera')", 2),
        Run("pipeline(2, 4, 'zb_h1+R')", 2),
    ],
    "stacked GPT, 5 layers with remat": pipelines(2, INNER),
    "stacked nnx GPT": pipelines(3, INNER),
    "stacked Evoformer that recycles": [
        Run("three_f_one_b(2, 4)", 2),
        Run("three_f_one_b(2, 2, plan=dap())", 4),
        Run("three_f_one_b(2, 2, plan=data_parallel())", 4),
        Run("pipeline(2, 2, 'gpipe', plan=dap())", 4),
        Run("pipeline(2, 4, 'chimera')", 2),
    ],
}
