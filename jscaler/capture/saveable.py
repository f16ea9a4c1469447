"""What a checkpoint policy saves: ``jax.checkpoint(policy=…)`` asks it for every equation of the region.

    x ──► dot ──► a ──► tanh ──► b ──► dot ──► c        dots_saveable: a and c are kept, tanh is computed again
          saved         again          saved

An equation whose result is saved while a reader of it is not ends its op, so that the saved value has a name. Where a
policy saves all, nothing is computed again, and there is no region.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jscaler.errors import CaptureWarning, warn

Policy = Callable[..., Any]


@dataclass(frozen=True)
class Saved:
    """Variables of a region that are saved; those that end their op are read by what is computed again."""

    kept: frozenset[core.Var] = field(default=frozenset())
    ends: frozenset[core.Var] = field(default=frozenset())


def saves(policy: Policy, eqn: core.JaxprEqn) -> bool:
    """Whether ``policy`` saves the results of ``eqn``.

    Warns:
        CaptureWarning: it would have them in another memory space; they stay in the device's.
    """
    case = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if isinstance(case, bool):
        return case
    if hasattr(case, "dst"):
        warn(
            f"a checkpoint policy offloads results of '{eqn.primitive.name}' from {case.src} to {case.dst}: they are saved "
            "on the device instead; no plan moves them yet",
            CaptureWarning,
        )
        return True
    return type(case) is not _again()


@functools.cache
def _again() -> type:
    """The class of what a policy returns for what is not to be saved, which has no public name."""
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return type(policy(lax.neg_p))


def saves_all(policy: Policy | None, eqns: Iterable[core.JaxprEqn]) -> bool:
    """Whether ``policy`` saves what every one of ``eqns`` makes."""
    return policy is not None and all(saves(policy, eqn) for eqn in eqns)


def saved_values(policy: Policy | None, eqns: Sequence[core.JaxprEqn]) -> Saved:
    """What ``policy`` saves of the results of ``eqns``, whose calls are inlined."""
    if policy is None:
        return Saved()
    chosen = [saves(policy, eqn) for eqn in eqns]
    kept = frozenset(v for eqn, saved in zip(eqns, chosen, strict=True) if saved for v in eqn.outvars)
    again = {v for eqn, saved in zip(eqns, chosen, strict=True) if not saved for v in eqn.invars if isinstance(v, core.Var)}
    return Saved(kept, kept & again)
