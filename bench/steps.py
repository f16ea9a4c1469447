"""Train steps that benchmarks take apart: by name, each with its arguments for 8 devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jscaler

DEVICES = 8
Step = tuple[Callable[..., Any], tuple[Any, ...]]
# Every other layer of the MLP by columns, the next by rows; and its batch's rows in place of a sequence.
EVEN = '{"*/layer_0/kernel": 1, "*/layer_2/kernel": 1, "*/layer_4/kernel": 1}'
ROWS = '{"batch/x": 0}'


def mlp() -> Step:
    """The 6-layer MLP (Dense and relu) with Adam."""
    from models.mlp import MLP

    model, optimizer = MLP(hidden=256, layers=6, out=16), optax.adam(1e-3)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    batch = {"x": jnp.ones((64, 64)), "y": jnp.zeros((64,), jnp.int32)}

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss_fn(params: Any) -> jax.Array:
            logits = jnp.asarray(model.apply({"params": params}, batch["x"]))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, gradients = jscaler.value_and_grad(loss_fn)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return step, ((params, optimizer.init(params)), batch)


def gpt(size: str, **changes: Any) -> Step:
    """GPT with dropout, clipping and AdamW; ``changes`` are those of its sizes."""
    from models.gpt import GPT, SIZES
    from models.text import batch_at, load_bytes
    from models.training import make_optimizer, make_state, train_step

    config = dataclasses.replace(SIZES[size], **changes)
    state = make_state(GPT(config), config.sequence, make_optimizer())
    return train_step, (state, batch_at(load_bytes(), 0, DEVICES, config.sequence))


def llama(size: str, **changes: Any) -> Step:
    """The Llama in nnx, with clipping and AdamW."""
    from models import make_model
    from models.recipes import RECIPES
    from models.text import batch_at, load_bytes
    from models.training import make_optimizer

    model, config = make_model("llama", size, **changes)
    state = RECIPES["llama"].make_state(model, config, make_optimizer(), jax.random.key(0))
    return RECIPES["llama"].step, (state, batch_at(load_bytes(), 0, DEVICES, config.sequence))


def moe(size: str, **changes: Any) -> Step:
    """The mixture of experts, with its load-balancing loss."""
    from models.moe import SIZES, MoE
    from models.text import batch_at, load_bytes
    from models.training import balanced_train_step, make_optimizer, make_state

    config = dataclasses.replace(SIZES[size], **changes)
    state = make_state(MoE(config), config.sequence, make_optimizer())
    return balanced_train_step, (state, batch_at(load_bytes(), 0, DEVICES, config.sequence))


def mbart(size: str, **changes: Any) -> Step:
    """mBART with dropout, clipping and AdamW."""
    from models.mbart import SIZES, MBart
    from models.text import load_bytes, pair_at
    from models.training import make_optimizer, make_state, translation_train_step

    config = dataclasses.replace(SIZES[size], **changes)
    state = make_state(MBart(config), [(config.sequence,)] * 2, make_optimizer())
    return translation_train_step, (state, pair_at(load_bytes(), 0, DEVICES, config.sequence))


def evoformer(size: str, **changes: Any) -> Step:
    """The Evoformer, with two passes without a gradient; an alignment for each of two devices."""
    from models.alignments import alignment_at
    from models.evoformer import SIZES, Evoformer
    from models.training import evoformer_train_step, make_optimizer, make_state

    config = dataclasses.replace(SIZES[size], **changes)
    state = make_state(Evoformer(config), [(config.sequences, config.residues), (config.residues,)], make_optimizer())
    return evoformer_train_step, (state, alignment_at(0, 2, config.sequences, config.residues, config.bins))


STEPS: dict[str, Callable[[], Step]] = {
    "mlp-6 f32": mlp,
    "gpt-nano f32": lambda: gpt("nano", heads=8),
    "gpt-mini f32": lambda: gpt("mini"),
    # two heads of keys and values: four devices have each, of eight, and two of four
    "llama-nano f32": lambda: llama("nano", heads=8),
    "moe-nano f32, 2 layers": lambda: moe("nano"),
    "gpt-nano bf16 compute": lambda: gpt("nano", heads=8, dtype=jnp.bfloat16),
    "mbart-nano f32": lambda: mbart("nano"),
    "mbart-nano f32, 257 words": lambda: mbart("nano", vocabulary=257),
    "evoformer-nano f32": lambda: evoformer("nano", recycles=0),
    "evoformer-nano f32, stacked": lambda: evoformer("nano", recycles=0, stacked=True),
}
