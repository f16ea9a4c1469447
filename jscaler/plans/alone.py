"""Remedies where ops need all micro-batches, said only where they were tried on the graph at hand.

what needs all micro-batches ──► patterns of its modules ──► the policy with these alone ──► planned: said, or the next
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.errors import JscalerError, PlanError
from jscaler.primitives.per_microbatch import several

TRIES = 4


@dataclass(frozen=True)
class Apart:
    """What runs micro-batches in several loops in place of a policy with stages; its attribute ``apart``."""

    said: str
    policy: Callable[..., Any]


def tried_apart(policy: Any, trial: Callable[[Any], Any]) -> str:
    """``accumulate(2, data_parallel())``, where the plan goes through with it; else nothing.

    Args:
        policy: what the user gave; that of `pipeline` names another.
        trial: plans by a policy.
    """
    known = getattr(policy, "apart", None)
    if not isinstance(known, Apart):
        return ""
    try:
        trial(known.policy)
    except JscalerError:
        return ""
    return f"{known.said} runs the loops one behind the other on all devices, with the same numbers"


@dataclass(frozen=True)
class Alone:
    """What a policy runs on each micro-batch alone, and the policy with another such selection; its attribute ``alone``."""

    given: Any
    remade: Callable[[Any], Callable[..., Any]]


def tried_alone(policy: Any, paths: Sequence[str], trial: Callable[[Any], Sequence[str] | None]) -> str:
    """``per_microbatch='aux'``, where the plan goes through with it; else nothing.

    Args:
        policy: what the user gave; those of `accumulate` and `pipeline` can be made again.
        paths: ops that need all micro-batches, or that others need all micro-batches of.
        trial: plans by a policy; returns None where one loop is left, else paths of ops that still need all micro-batches.
    """
    known = getattr(policy, "alone", None)
    chosen, found = list[str](), list(dict.fromkeys(map(_pattern, paths)))
    if not isinstance(known, Alone):  # a finished plan, or a policy of one's own
        return ""
    given = several(known.given) if known.given is not None else []
    for _ in range(TRIES):
        more = next((pattern for pattern in found if pattern not in chosen), None)
        if more is None:
            break
        chosen.append(more)
        try:
            left = trial(known.remade([*given, *chosen]))
        except PlanError as error:
            left = error.alone
        except JscalerError:
            break
        else:
            if left is None:
                said = ", ".join(repr(one) if isinstance(one, str) else "…" for one in (*given, *chosen))
                said = f"[{said}]" if len(given) + len(chosen) > 1 else said
                return f"per_microbatch={said} does it on each micro-batch alone, which gives other numbers"
        found = [*map(_pattern, left), *found]
    return ""


def _pattern(path: str) -> str:
    """The modules called like that of an op: ``BatchNorm_*`` of ``block_0/BatchNorm_1/mul``."""
    module = path.rpartition("/")[0] or path
    return re.sub(r"_\d+$", "_*", module.rpartition("/")[2])
