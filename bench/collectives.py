"""What does a plan send? Kinds, counts and payload bytes per device from the compiled HLO, beside GSPMD's for the same
split. ``count`` is of tensors (XLA launches neighbours together). Data parallelism must reduce each gradient once:
parameter bytes and one scalar, and nothing else.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jscaler
from bench.harness import Row, main

COLUMNS = ("case", "plan", "target", "op", "count", "bytes", "gspmd_bytes")
SCALARS = 64  # bytes of losses and norms that may be reduced beside the gradients
DEVICES = 8


def mlp_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
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


def gpt_step(size: str, dtype: Any = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """GPT with dropout, clipping and AdamW."""
    import dataclasses

    from models.gpt import GPT, SIZES
    from models.text import batch_at, load_bytes
    from models.training import make_optimizer, make_state, train_step

    config = dataclasses.replace(SIZES[size], dtype=dtype)
    state = make_state(GPT(config), config.sequence, make_optimizer())
    return train_step, (state, batch_at(load_bytes(), 0, DEVICES, config.sequence))


def rows(quick: bool) -> Iterator[Row]:
    from jscaler.compare import twin
    from jscaler.report.hlo import totals

    cases = [("mlp-6 f32", mlp_step()), ("gpt-nano f32", gpt_step("nano"))]
    if not quick:
        cases += [("gpt-mini f32", gpt_step("mini")), ("gpt-nano bf16 compute", gpt_step("nano", jnp.bfloat16))]
    for case, (fun, args) in cases:
        lowered = jscaler.parallelize("data_parallel", devices=DEVICES, donate_argnames="state")(fun).lower(*args)
        ours, theirs = totals(lowered.compile().as_text()), totals(twin(lowered).as_text())
        for op in sorted({*ours, *theirs}):
            mine, gspmd = ours.get(op), theirs.get(op)
            yield _row(case, op, mine.arrays if mine else 0, mine.nbytes if mine else 0, gspmd.nbytes if gspmd else 0)
        expected = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(parameters(args[0])))
        sent, gspmd_sent = (sum(t.nbytes for t in side.values()) for side in (ours, theirs))
        beyond = _row(case, "all, beyond the parameters' bytes", "", sent - expected, gspmd_sent - expected)
        yield {**beyond, "value": sent - expected, "bound": SCALARS}
        ratio = sent / gspmd_sent
        yield {**_row(case, "ratio to GSPMD", "", round(ratio, 4), 1.0), "value": ratio, "bound": 1.02}


def parameters(state: Any) -> Any:
    """The parameters in a train state, or first in a tuple."""
    return state[0] if isinstance(state, tuple) else state.params


def _row(case: str, op: str, count: Any, nbytes: Any, gspmd: Any) -> Row:
    where = {"case": case, "plan": "data_parallel", "target": f"cpu:{DEVICES}", "op": op}
    return {**where, "count": count, "bytes": nbytes, "gspmd_bytes": gspmd}


if __name__ == "__main__":
    main("collectives", __doc__ or "", COLUMNS, rows)
