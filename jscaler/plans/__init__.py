"""Ready plan policies. Each is a function that returns a policy; a policy may also be written by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jscaler.errors import PlanError, UnknownNameError, shown
from jscaler.plans.accumulate import accumulate
from jscaler.plans.co_shard import co_shard
from jscaler.plans.dap import dap
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.expert_parallel import expert_parallel
from jscaler.plans.interlaced import interlaced
from jscaler.plans.megatron import megatron
from jscaler.plans.parse import PlanCall, parse_call, with_arguments
from jscaler.plans.pipeline import pipeline, stage_chain
from jscaler.plans.recompute_layers import recompute_layers
from jscaler.plans.selective_recompute import selective_recompute
from jscaler.plans.sequence_parallel import sequence_parallel
from jscaler.plans.single import single
from jscaler.plans.spatial import spatial
from jscaler.plans.tensor_parallel import tensor_parallel
from jscaler.plans.three_f_one_b import three_f_one_b
from jscaler.plans.vocab_parallel import vocab_parallel
from jscaler.plans.zero import zero1, zero2, zero3
from jscaler.primitives import Plan
from jscaler.user_file import function_in

Factory = Callable[..., Callable[..., Any]]
PLANS: dict[str, Factory] = {
    made.__name__: made
    for made in (
        single, data_parallel, tensor_parallel, sequence_parallel, vocab_parallel, megatron, expert_parallel,
        spatial, dap, zero1, zero2, zero3, accumulate, pipeline, interlaced, three_f_one_b, co_shard,
        recompute_layers, selective_recompute,
    )
}  # fmt: skip
STAGE_CHAINS = {pipeline.__name__: stage_chain}  # of plans in stages, from the same arguments
ALIASES = {"fsdp": "zero3"}  # as PyTorch's users call it
fsdp = zero3


def by_name(name: str) -> Callable[..., Any] | Plan:
    """The policy, or the finished plan, that ``name`` says.

    Args:
        name: a built-in plan, ``"data_parallel"``, with arguments if wanted, ``"megatron(dp=2, tp=4)"``; or a function
            in a file: ``"path.py:function"`` is a policy, ``"path.py:function(parts=2)"`` returns one; or a saved plan,
            ``"path.json"``. A plan may be an argument of a plan.

    Raises:
        UnknownNameError: no plan, argument, or function in the file, has that name.
        PlanError: there is no such file, it cannot be run, or the arguments are no literals or not those of the plan.
        PlanFileError: a saved plan cannot be read.

    Example:
        >>> policy = plans.by_name("accumulate(2, zero2())")
        >>> policy.__name__
        'accumulate'
    """
    if not isinstance(name, str):
        raise PlanError(
            f"by_name takes the name of a plan, such as 'data_parallel' or 'megatron(dp=2, tp=4)', not {shown(name)}"
        )
    if name.endswith(".json"):
        return Plan.load(name)
    called, arguments = parse_call(name)
    path, _, function = called.rpartition(":")
    if path.endswith(".py"):
        found = function_in(Path(path), function, "plan", PlanError)
        return found if arguments is None else arguments.call(found, _inner)
    return _made(arguments or PlanCall(called))


def with_schedule(name: str, schedule: str, **more: Any) -> str:
    """The text of a plan with another schedule.

    Args:
        name: the text of a built-in plan, as for `by_name`.
        schedule: the name of a published schedule, or a table's text.
        more: other arguments of the plan that change.

    Raises:
        UnknownNameError: no plan has that name, or it has no schedule.
        PlanError: it is a function in a file, or a saved plan.

    Example:
        >>> plans.with_schedule("pipeline(2, 4)", "zb_h1", microbatches=8)
        "pipeline(2, 8, schedule='zb_h1')"
    """
    for what, text in (("name", name), ("schedule", schedule)):
        if not isinstance(text, str):
            raise PlanError(f"with_schedule: {what} is the text of a plan or of a schedule, not {shown(text)}")
    called, _ = parse_call(name)
    if called not in PLANS:
        raise PlanError(
            f"a schedule is given to a built-in plan with stages, and '{name}' is none: say it in the plan itself"
        )
    return with_arguments(name, PLANS[called], schedule=schedule, **more)


def _made(call: PlanCall) -> Callable[..., Any]:
    name = ALIASES.get(call.name, call.name)
    if name not in PLANS:
        hint = "; a policy of your own is path.py:function, a saved plan path.json"
        raise UnknownNameError("plan", name, [*PLANS, *ALIASES], hint)
    return call.call(PLANS[name], _inner)


def _inner(plan: PlanCall | str) -> Callable[..., Any]:
    """The policy of a plan that is an argument of another."""
    found = _made(plan) if isinstance(plan, PlanCall) else by_name(plan)
    if isinstance(found, Plan):
        raise PlanError(f"the saved plan '{plan}' is finished: no other plan can add to it; give a policy")
    return found


__all__ = [
    "PLANS", "accumulate", "by_name", "co_shard", "dap", "data_parallel", "expert_parallel", "fsdp", "interlaced",
    "megatron", "pipeline", "recompute_layers", "selective_recompute", "sequence_parallel", "single", "spatial",
    "tensor_parallel", "three_f_one_b", "vocab_parallel", "with_schedule", "zero1", "zero2", "zero3",
]  # fmt: skip
