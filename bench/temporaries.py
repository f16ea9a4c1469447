"""What co-shard leaves of the temporaries of a stack of layers, for a GPU that need not be there.

4 layers as in GPT-3 1.3B (hidden 2048, 16 heads of 128; batch 1, sequence 4096, bfloat16), gradients of all parameters.
``layers``: a Python loop, or one scan. ``temporaries``: MiB that XLA reserves beside arguments and results, under the
plan; ``rival``: the same under ``jax.jit``, with nothing but ``jax.grad``, with ``jax.checkpoint`` around each layer, or
by `bench.by_hand`'s co-shard. ``prototype``: what was once measured by hand, to which a plan that does not save all is
held. (A scan of layers under ``jax.grad`` also saves the normalised activations and the cut weights of each layer, as
``rival`` shows.) ``swin``: the third stage of Swin's 1.8B, two blocks of 2 x 2 windows of 48 x 48 patches, 2048 channels,
64 heads; its rival is ``jax.checkpoint`` around each block. ``llama``: 4 layers as in Llama 1B (hidden 2048, 32 heads of
64, 8 of keys and values, 8192 hidden units; batch 1, sequence 4096), beside the same rival.

Nothing runs, and no GPU is needed: ``pip install "jscaler[aot]"``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jscaler
from bench import by_hand
from bench.compiled import jitted, temporaries
from bench.harness import Row, main
from models.gpt import SIZES, GPTConfig, blocks
from models.llama import SIZES as LLAMAS
from models.llama import LlamaConfig, layers_of, through
from models.swin import SIZES as SWINS
from models.swin import Stage, SwinConfig

COLUMNS = ("model", "case", "layers", "parts", "plan", "temporaries", "rival", "prototype")

Config = GPTConfig | SwinConfig | LlamaConfig


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        plan: as on the command line.
        parts: groups of heads and hidden units; 0 for whole layers.
        stacked: whether the layers are one scan.
        remat: whether layers are checkpointed, by the model itself where the plan is ``single``.
        prototype: MiB.
        model: ``gpt``'s or ``llama``'s layers, or ``swin``'s blocks.
    """

    plan: str
    parts: int = 0
    stacked: bool = False
    remat: bool = False
    prototype: int | None = None
    model: str = "gpt"

    @property
    def name(self) -> str:
        words = [f"co-shard {self.parts}"] if self.parts else []
        words += ["jax.checkpoint"] if self.remat else []
        return " + ".join(words) or "save all"


CASES = [
    Case("single", prototype=5561),
    Case("single", remat=True, prototype=1976),
    Case("recompute_layers", remat=True, prototype=1976),
    Case("single", stacked=True),
    Case("single", stacked=True, remat=True),
    Case("recompute_layers", stacked=True, remat=True),
    *(Case(f"co_shard({k})", k, prototype=known) for k, known in ((2, None), (4, 1098), (8, 1035))),
    # by hand, layers in a scan took 934 and 731, and 836 and 546 where they were checkpointed too
    *(Case(f"co_shard({k})", k, stacked=True, prototype=known) for k, known in ((2, None), (4, 836), (8, 546))),
    Case("single", model="swin"),
    Case("single", remat=True, model="swin"),
    *(Case(f"co_shard({k})", k, model="swin") for k in (2, 4, 8)),
    Case("single", model="llama"),
    Case("single", remat=True, model="llama"),
    *(Case(f"co_shard({k})", k, model="llama") for k in (2, 8)),
]


def full_size(model: str) -> Config:
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    if model == "swin":
        return dataclasses.replace(SWINS["1.8b"], **kinds)
    if model == "llama":
        return dataclasses.replace(LLAMAS["1b"], layers=4, sequence=4096, **kinds)
    return dataclasses.replace(SIZES["1.3b"], heads=16, layers=4, sequence=4096, dropout=0.0, **kinds)


class Layers(nn.Module):
    """The blocks of a GPT alone."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        return blocks(self.config, x, train=True)


Loss = Callable[[Any, jax.Array], jax.Array]


class Model(NamedTuple):
    """A case's layers.

    Attributes:
        params: their parameters, as shapes.
        apply: ``apply(params, x)``.
        x: what they read, as a shape.
    """

    params: Any
    apply: Callable[[Any, jax.Array], jax.Array]
    x: jax.ShapeDtypeStruct


def model_of(case: Case, config: Config, remat: bool = False) -> Model:
    """The case's layers, which the model checkpoints with ``remat``."""
    config = dataclasses.replace(config, stacked=case.stacked, remat=remat)
    if isinstance(config, LlamaConfig):
        graph, params = nnx.split(nnx.eval_shape(lambda: layers_of(config, nnx.Rngs(0))))
        x = jax.ShapeDtypeStruct((1, config.sequence, config.hidden), config.dtype)
        return Model(params, lambda params, x: through(nnx.merge(graph, params), x, remat), x)
    module, x = _module(config)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return Model(params, lambda params, x: jnp.asarray(module.apply({"params": params}, x)), x)


def _module(config: GPTConfig | SwinConfig) -> tuple[nn.Module, jax.ShapeDtypeStruct]:
    if isinstance(config, GPTConfig):
        return Layers(config), jax.ShapeDtypeStruct((1, config.sequence, config.hidden), config.dtype)
    rows = config.image // config.patch // 4  # of the third stage
    x = jax.ShapeDtypeStruct((1, rows, rows, 4 * config.hidden), config.dtype)
    return Stage(config, 4 * config.heads, 2), x


def by_model(case: Case, config: Config, remat: bool) -> Loss:
    """The mean square of what the layers make of x."""
    model = model_of(case, config, remat)
    return lambda params, x: _mean_square(model.apply(params, x))


def by_hands(case: Case, config: GPTConfig) -> Loss:
    """The same of layers in parts, written by hand."""

    def forward(x: jax.Array, params: Any) -> jax.Array:
        return by_hand.layer(params, x, case.parts)

    once = jax.checkpoint(forward, prevent_cse=not case.stacked) if case.remat else forward

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        if case.stacked:
            return _mean_square(jax.lax.scan(lambda x, p: (once(x, p), None), x, params["blocks"])[0])
        return _mean_square(functools.reduce(once, (params[f"block_{i}"] for i in range(config.layers)), x))

    return loss_fn


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).mean()


def arguments(case: Case, config: Config) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Parameters and x as shapes."""
    model = model_of(case, config)
    return model.params, model.x


def row(case: Case, config: Config, device: Any, options: dict[str, Any], rival_only: bool = False) -> Row:
    """Compile a case under its plan and by hand."""
    structs = arguments(case, config)
    found: Row = {
        "model": case.model,
        "case": case.name,
        "layers": "one scan" if case.stacked else "loop",
        "parts": case.parts or "",
    }
    if not rival_only:
        step = jscaler.grad(by_model(case, config, remat=case.remat and case.plan == "single"))
        lowered = jscaler.parallelize(case.plan, devices=[device])(step).lower(*structs).lowered
        limit = {} if case.prototype is None or case.name == "save all" else {"temporaries": case.prototype}
        found |= {"plan": case.plan, "temporaries": temporaries(lowered.compile(options)), "bounds": limit}
    if case.parts and isinstance(config, GPTConfig):
        rival = by_hands(case, config)
    else:
        rival = by_model(case, config, case.remat or case.parts > 0)
    compiled = jitted(jax.grad(rival), structs, device).compile(options)
    return {**found, "rival": temporaries(compiled), "prototype": case.prototype or ""}


def rows(quick: bool, target: str, rival_only: bool, model: str | None = None) -> Iterator[Row]:
    from jscaler.report.targets import described_devices
    from jscaler.runtime.target import WITHOUT_GPU

    device = described_devices(f"1x{target}")[0]
    for case in CASES[:2] if quick else [c for c in CASES if model in (None, c.model)]:
        yield row(case, full_size(case.model), device, dict(WITHOUT_GPU), rival_only)


if __name__ == "__main__":
    options: dict[str, Any] = {
        "target": {"metavar": "GPU", "default": "H100-80GB", "help": "one described device"},
        "model": {"choices": ["gpt", "swin", "llama"], "help": "only rows of this model"},
        "rival-only": {"action": "store_true", "help": "leave out plans"},
    }
    main("temporaries", __doc__ or "", COLUMNS, rows, devices=1, options=options)
