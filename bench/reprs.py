"""How long are ``repr`` and the cell of a notebook, and what do they take? For what a user holds of a ViT, of GPT 1.3B
and, in nnx, of Llama 8B.

The decorated step, its graph as captured and as a policy gets it, ``lowered``, its plan, and the plan's decisions. Nothing
is allocated and nothing compiled. ``lines`` of ``repr`` are held to 20, ``bytes`` of each of the two to 100 kB, and
``milliseconds`` of CPU of the slower to 100: of the first call, garbage collection left out.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jscaler
from bench.harness import Row, main
from bench.planning import cpu_seconds

COLUMNS = ("model", "object", "lines", "bytes", "html_bytes", "milliseconds")
BOUNDS = {"lines": 20, "bytes": 100_000, "html_bytes": 100_000, "milliseconds": 100.0}
DEVICES = 8
WIDTH, HEADS, PATCHES = 768, 12, 196
OPTIMIZER = optax.adamw(1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attn")(nn.LayerNorm(name="norm_1")(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm_2")(x))))


class ViT(nn.Module):
    """ViT-B/16, its layers a Python loop."""

    layers: int = 12

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (16, 16), (16, 16), name="patches")(images).reshape(-1, PATCHES, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, PATCHES, WIDTH))
        for number in range(self.layers):
            x = Block(name=f"block_{number}")(x)
        return nn.Dense(1000, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


def vit(layers: int = 12) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A train step, and its arguments as shapes."""
    model = ViT(layers)

    def vit_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> dict[str, Any]:
        def loss(params: Any) -> jax.Array:
            logits: Any = model.apply({"params": params}, batch["images"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        updates, opt = OPTIMIZER.update(jscaler.grad(loss)(state["params"]), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    images, labels = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    state = {"params": params, "opt": jax.eval_shape(OPTIMIZER.init, params)}
    return vit_step, (state, {"images": images, "labels": labels})


def built_in(model: str, stacked: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The train step of ``gpt-1.3b`` or another, and its arguments as shapes."""
    from jscaler.commands.built_in_job import built_in_job
    from jscaler.training.planned_job import PlannedJob

    job = PlannedJob(built_in_job(model, None, 16, dtype="bf16", stacked=stacked, remat=True), "single", 1)
    return job.job.train_step, job.arguments()


def held(fun: Callable[..., Any], arguments: tuple[Any, Any], plan: str) -> Mapping[str, Any]:
    """What a user holds, of a step that is lowered for ``DEVICES``."""
    seen: list[Any] = []
    chosen: Any = jscaler.plans.by_name(plan)

    def policy(graph: Any, devices: Any) -> None:
        seen.append(graph)
        chosen(graph, devices)

    step = jscaler.parallelize(policy, devices=DEVICES)(fun)
    lowered = step.lower(*arguments)
    return {
        "step": step, "lowered": lowered, "plan": lowered.plan, "decisions": lowered.plan.plan,
        "graph": lowered.captured.graph, "policy's graph": seen[0],
    }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    """A row for each object; quick is without GPT's loop of 24 layers."""
    models = {"ViT-B/16": vit, "GPT 1.3B, stacked": lambda: built_in("gpt-1.3b", True)}
    models |= {"Llama 8B, stacked": lambda: built_in("llama-8b", True)}
    models |= {} if quick else {"GPT 1.3B, Python loop": lambda: built_in("gpt-1.3b", False)}
    for name, make in models.items():
        fun, arguments = make()
        for what, one in held(fun, arguments, "megatron(dp=2, tp=4)").items():
            long, page = cpu_seconds(one._repr_html_)
            short, text = cpu_seconds(one.__repr__)
            yield {
                "model": name, "object": what, "lines": text.count("\n") + 1, "bytes": len(text.encode()),
                "html_bytes": len(page.encode()), "milliseconds": 1e3 * max(short, long), "bounds": BOUNDS,
            }  # fmt: skip


if __name__ == "__main__":
    main("reprs", __doc__ or "", COLUMNS, rows, devices=DEVICES)
