"""The remedy ``per_microbatch=``, said only where it was tried on the graph at hand.

what needs all micro-batches ──► patterns of its modules ──► the policy with these alone ──► planned: said, or the next
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jscaler.errors import JscalerError, PlanError

TRIES = 4


def tried_alone(policy: Any, paths: Sequence[str], trial: Callable[[Any], Sequence[str]]) -> str:
    """``per_microbatch='aux'``, where the plan goes through with it; else nothing.

    Args:
        policy: what the user gave; of `accumulate` and `pipeline` it can be made again with more on each micro-batch alone.
        paths: ops that need all micro-batches, or that others need all micro-batches of.
        trial: plans by a policy, and returns paths of ops that still need all micro-batches.
    """
    remade = getattr(policy, "alone", None)
    chosen, found = list[str](), list(dict.fromkeys(map(_pattern, paths)))
    if remade is None:
        return ""
    for _ in range(TRIES):
        more = next((pattern for pattern in found if pattern not in chosen), None)
        if more is None:
            break
        chosen.append(more)
        try:
            left = trial(remade(chosen))
        except PlanError as error:
            left = error.alone
        except JscalerError:
            break
        else:
            if not left:
                said = repr(chosen if len(chosen) > 1 else chosen[0])
                return f"per_microbatch={said} does it on each micro-batch alone, which gives other numbers"
        found += map(_pattern, left)
    return ""


def _pattern(path: str) -> str:
    """The modules called like that of an op: ``BatchNorm_*`` of ``block_0/BatchNorm_1/mul``."""
    module = path.rpartition("/")[0] or path
    return re.sub(r"_\d+$", "_*", module.rpartition("/")[2])
