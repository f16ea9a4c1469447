"""The built-in spaces by name, and what a person may give in the place of one."""

from collections.abc import Callable, Sequence
from typing import Any

from jscaler.errors import PlanError, UnknownNameError, shown
from jscaler.spaces.alpa import alpa
from jscaler.spaces.co_shard import co_shard
from jscaler.spaces.dap import dap
from jscaler.spaces.expert_parallel import expert_parallel
from jscaler.spaces.free import free
from jscaler.spaces.given_plans import GivenPlans
from jscaler.spaces.interlaced import interlaced
from jscaler.spaces.megatron import megatron
from jscaler.spaces.memory import memory
from jscaler.spaces.open_space import OpenSpace
from jscaler.spaces.per_op import per_op
from jscaler.spaces.space import Space
from jscaler.spaces.stage_space import StageSpace
from jscaler.spaces.stages import stages
from jscaler.spaces.three_f_one_b import three_f_one_b
from jscaler.spaces.zero import zero

AnySpace = Space | OpenSpace | StageSpace | GivenPlans
CLOSED = (zero, megatron, expert_parallel, dap, co_shard, interlaced, three_f_one_b)
SPACES: dict[str, Callable[[], Sequence[AnySpace]]] = {made.__name__: made for made in CLOSED}
SPACES[stages.__name__] = stages
SPACES |= {policy.__name__: lambda policy=policy: [OpenSpace(policy)] for policy in (per_op, alpa, free)}
SPACES |= {"memory": memory}


def as_spaces(given: Any) -> list[Sequence[AnySpace]]:
    """Spaces in the order in which they are searched; where ``given`` is None those of published plans, and ``per_op``.

    Args:
        given: a `Space` or `OpenSpace`; the name of a built-in one; or several of them.

    Raises:
        UnknownNameError: no built-in space has that name.
        PlanError: it is no space.

    Example:
        >>> [str(space) for space in as_spaces("expert_parallel")[0]]  # doctest: +ELLIPSIS
        ['accumulate(microbatches=parts_of_batch(), plan=[expert_parallel(), ...])']
    """
    if given is None:
        return [*(made() for made in CLOSED), SPACES["per_op"]()]
    several: Sequence[Any] = [*given] if isinstance(given, list | tuple) else [given]
    found: list[Sequence[AnySpace]] = []
    for one in several:
        if isinstance(one, AnySpace):
            found.append([one])
        elif isinstance(one, str):
            if one not in SPACES:
                raise UnknownNameError("space", one, [*SPACES], "; a space of your own is a jscaler.spaces.Space")
            found.append(SPACES[one]())
        elif callable(one):
            made = next((made for made in SPACES.values() if made is one), None)
            found.append(made() if made is not None else [OpenSpace(one)])
        else:
            raise PlanError(f"a space is a jscaler.spaces.Space, or the name of a built-in one, not {shown(one)}")
    if not found:
        raise PlanError(f"search: no space is given; there are {', '.join(SPACES)}")
    return found
