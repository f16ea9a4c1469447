"""The models of the paper's evaluation as graphs of a train step: captured by shape, layers stacked, float16 from masters.

Parameters and moments are float32 and the models compute in float16: as many bytes per parameter as with a copy of the
parameters in 16 bits (`models.master`), 16 with its gradient. Dropout is off: V100 kernels fuse it.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jscaler

SIZES = {  # of 4, 8, 16 and 32 GPUs
    "swin": ("1.8b", "5.0b", "10.4b", "27b"),
    "gpt": ("1.3b", "2.6b", "6.7b", "15b"),
    "mbart": ("3.9b", "11.6b", "21.3b", "46.4b"),
    "evoformer": ("87m", "930m", "2.4b", "3.2b"),
}
PAPER = {"swin": 3.5, "gpt": 1.5, "mbart": 2.8, "evoformer": 1.4}  # speed of the best new plan by that of the best old one
GPUS = (4, 8, 16, 32)
BATCH = {"evoformer": 128}
CLUSTERS = {4: "4xV100-32GB", 8: "8xV100-32GB", 16: "2x8xV100-32GB", 32: "4x8xV100-32GB"}


@dataclass(frozen=True)
class Model:
    """A model of one size, by name and shapes.

    Attributes:
        changes: of its size: ``(("sequence", 16384),)``.
    """

    name: str
    size: str
    batch: int
    changes: tuple[tuple[str, Any], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes what it is, and no graph."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def shown(self) -> str:
        return "-".join([self.name, self.size, *(f"{key}{value}" for key, value in self.changes)])

    @functools.cached_property
    def config(self) -> Any:
        from models import make_model

        _, config = make_model(self.name, self.size)
        wanted = {"stacked": True, "dtype": jnp.float16, **dict(self.changes)}
        wanted |= {"dropout": 0.0} if hasattr(config, "dropout") else {}
        wanted |= {"msa_dropout": 0.0, "pair_dropout": 0.0} if hasattr(config, "msa_dropout") else {}
        return dataclasses.replace(config, **wanted)

    @functools.cached_property
    def state(self) -> Any:
        from models import MODELS
        from models.recipes import RECIPES
        from models.training import make_optimizer

        module, config = MODELS[self.name][0](self.config), self.config
        make = RECIPES[self.name].make_state
        return jax.eval_shape(lambda: make(module, config, make_optimizer(), jax.random.key(0)))

    @functools.cached_property
    def graph(self) -> Any:
        from models.recipes import RECIPES

        step = jscaler.parallelize("single", devices=1, donate_argnums=0)(RECIPES[self.name].step)
        return step.graph(self.state, batch_of(self.name, self.config, self.batch))

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state.params))

    @property
    def depth(self) -> int:
        """Layers, or pairs of them, behind each other: of Swin's those of all its stages, which `pipeline` balances."""
        return sum(self.config.depths) // 2 if self.name == "swin" else self.config.layers

    @property
    def exchanged(self) -> float:
        """Bytes of a row that tensor parallelism adds up between devices in the forward: two results a layer, at least."""
        c = self.config
        if self.name in ("gpt", "mbart"):
            return 2.0 * c.layers * c.sequence * c.hidden * 2 * (1 if self.name == "gpt" else 2.5)
        return 0.0

    @property
    def operands(self) -> float:
        """Bytes of a row that layers keep for their backward if nothing is computed again: what products read."""
        c = self.config
        if self.name in ("gpt", "mbart"):
            layer = c.sequence * (2 * c.heads * c.sequence + 14 * c.hidden)  # weights; query, key, value, and hidden units
            return float(layer * c.layers * (1 if self.name == "gpt" else 2))
        return 0.0


def batch_of(name: str, config: Any, rows: int) -> dict[str, Any]:
    """The shapes of a batch."""

    def of(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    if name == "swin":
        return {"images": of(config.image, config.image, 3, dtype=jnp.uint8), "labels": of()}  # as files have them
    if name == "evoformer":
        table = (config.sequences, config.residues)
        return {
            "msa": of(*table), "target": of(config.residues), "labels": of(*table),
            "weights": of(*table, dtype=jnp.float32), "distances": of(config.residues, config.residues),
        }  # fmt: skip
    words = ("source", "tokens", "labels") if name == "mbart" else ("tokens", "labels")
    return {word: of(config.sequence) for word in words}


def model_for(name: str, gpus: int, **changes: Any) -> Model:
    """The size that the paper trains on so many GPUs."""
    size = SIZES[name][GPUS.index(gpus)]
    return Model(name, size, BATCH.get(name, 512), tuple(sorted(changes.items())))
