"""Blocked factors: every error says why, what frees the factor if anything does, and what can be split instead."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Split, SplitError
from jscaler.primitives import Planner

PROGRAMS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "running sum": (lambda x: jnp.cumsum(x, 1), "b", r"it is summed along; Prefix\('b', 2\) .* free here: a \(4\)"),
    "running maximum": (lambda x: jax.lax.cummax(x, 0), "a", r"Prefix\('a', 2\) in place of Split .*; free here: b \(6\)"),
    "both dims": (
        jax.named_scope("model/pairs")(lambda x: x @ x.T),
        "a",
        r"two dims of one tensor; it is free in ops .*; free here: b \(6\)",
    ),
    "mixed": (lambda x: x.reshape(3, 8), "a", "a reshape mixes it .*; cut the neighbouring factor, or reshape so"),
    "sorted": (lambda x: jnp.sort(x, 1), "b", r"it is sorted; nothing frees it, .*; free here: a \(4\); 'b' is x\[1\]$"),
    "largest": (lambda x: jax.lax.top_k(x, 2), "b", r"largest are taken; nothing frees it; take the largest of parts by"),
    "place of the largest": (lambda x: x.argmax(1), "b", "cannot be joined; nothing frees it: no collective joins"),
    "callback": (
        lambda x: jax.pure_callback(np.asarray, x, x) * 2,
        "a",
        "the host callback 'asarray' .* sees it whole; put the callback in a scope of its own",
    ),
    "nothing": (
        jax.named_scope("model/order")(lambda x: jnp.sort(x[0])),
        "a",
        r"no factor of the op can be split: copy it, by Replicate; .a. is x\[0\]$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_frees_a_blocked_factor(name: str) -> None:
    fun, factor, message = PROGRAMS[name]
    planner = Planner(jscaler.parallelize("single")(fun).graph(jnp.ones((4, 6))), 2)
    op = next(
        op for op in planner.ops if factor in planner.rule(op).factors and not planner.rule(op).factors[factor].splittable
    )
    with pytest.raises(SplitError, match=message):
        planner.op_trans(op, Split(factor, 2))
