"""The model's own checkpoint policies: what they save is saved, the rest is computed again, as under ``jax.jit``."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

import jscaler
from jscaler.errors import CaptureWarning
from jscaler.lower.flat_program import FlatProgram

POLICIES = jax.checkpoint_policies
PARAMS = {"up": jax.random.normal(jax.random.key(0), (4, 8)), "down": jax.random.normal(jax.random.key(1), (8, 4))}
X = jax.random.normal(jax.random.key(2), (2, 3, 4))


def region(params: Any, x: jax.Array) -> jax.Array:
    """Two contractions with kernels, one of a batch, and a value with a name in the middle of an elementwise op."""
    with jax.named_scope("layer"):
        h = jnp.cos(checkpoint_name(jnp.sin(x @ params["up"]), "middle") * 2)
        return jnp.tanh(jnp.einsum("bsh,bth->bst", h, h)) @ (h @ params["down"])


def loss_of(policy: Any, stacked: bool = False) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        again = jax.checkpoint(region, policy=policy)
        if not stacked:
            return jnp.sum(jnp.exp(again(params, x)))
        return jnp.sum(jnp.exp(lax.scan(lambda y, _: (again(params, y), None), x, None, length=3)[0]))

    return loss_fn


def flat(loss_fn: Callable[..., jax.Array]) -> Any:
    step = jscaler.parallelize("single", devices=1)(lambda params, x: jscaler.value_and_grad(loss_fn)(params, x))
    return step.lower(PARAMS, X).plan.flat


def of_flat(program: FlatProgram) -> Counter[str]:
    return Counter(e.primitive.name for e in program.equations)


def of_jaxpr(jaxpr: Any) -> Counter[str]:
    """The primitives of a jaxpr and of those in it, unused results left out."""
    found: Counter[str] = Counter()
    needed = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if isinstance(v, core.Var)}
            found[eqn.primitive.name] += 1
            for inner in core.jaxprs_in_params(eqn.params):
                found += of_jaxpr(getattr(inner, "jaxpr", inner))
    return found


KINDS = ("dot_general", "sin", "cos", "tanh")
CASES = {
    "nothing": (POLICIES.nothing_saveable, 3),
    "dots": (POLICIES.dots_saveable, 0),
    "dots without batch": (POLICIES.dots_with_no_batch_dims_saveable, 1),
    "a name": (POLICIES.save_only_these_names("middle"), 3),
    "any name but": (POLICIES.save_any_names_but_these("other"), 3),
    "everything": (POLICIES.everything_saveable, 0),
    "both": (POLICIES.save_from_both_policies(POLICIES.dots_saveable, POLICIES.save_only_these_names("middle")), 0),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_a_policy_saves_is_not_computed_again(name: str, stacked: bool) -> None:
    policy, dots = CASES[name]
    ours = of_flat(flat(loss_of(policy, stacked)))
    theirs = of_jaxpr(jax.make_jaxpr(jax.value_and_grad(loss_of(policy, stacked)))(PARAMS, X).jaxpr)
    assert ours["dot_general"] == theirs["dot_general"] == dots + (12 if stacked else 11)
    if name != "everything" or not stacked:  # what is elementwise, a loop's backward computes again in any case
        assert [ours[k] for k in KINDS] == [theirs[k] for k in KINDS]


@pytest.mark.parametrize(("stacked", "name"), [(False, "a name"), (True, "dots without batch")])
def test_numbers_are_those_of_jax(stacked: bool, name: str) -> None:
    loss_fn = loss_of(CASES[name][0], stacked)
    ours = jscaler.parallelize("single", devices=1)(lambda p, x: jscaler.value_and_grad(loss_fn)(p, x))(PARAMS, X)
    for mine, true in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.value_and_grad(loss_fn)(PARAMS, X)), strict=True):
        assert jnp.allclose(mine, true, rtol=1e-5, atol=1e-6)


def test_what_is_to_be_offloaded_is_saved_with_a_warning() -> None:
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    with pytest.warns(CaptureWarning, match="offloads results of 'dot_general' from device to pinned_host"):
        ours = of_flat(flat(loss_of(policy)))
    assert ours["dot_general"] == 12


def test_a_region_inside_another_follows_the_policy_of_the_outer() -> None:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        inner = jax.checkpoint(region, policy=POLICIES.dots_saveable)
        return jnp.sum(jnp.exp(jax.checkpoint(lambda y: inner(params, y) @ params["up"])(x)))

    graph = jscaler.parallelize("single", devices=1)(lambda p, x: jscaler.grad(loss_fn)(p, x)).graph(PARAMS, X)
    regions = {op.path: [r.name for r in op.remat] for op in graph.forward() if op.remat}
    assert len(regions["layer/dot"]) == 2
    assert not any(op.kept for op in graph.forward())
