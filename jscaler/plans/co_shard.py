"""Co-shard: attention heads and hidden units in parts that run one after another on the *same* device, and are computed
again for the backward pass, around another plan. (Lin et al., nnScaler, OSDI 2024, section 2.)

::

    x ──► norm ──► for each part of the heads:  query', key', value' ──► scores' ──► softmax' ──► mix' ──► out' ──► + ──► y
    y ──► norm ──► for each part of the units:  up' ──► gelu' ──► down' ──► + ──► z

Of a layer are kept x and y. One part's scores live at a time, in the backward pass too, where its forward runs once more
in the same iteration: heads/parts · s · s elements instead of heads · s · s. The loss runs along the tokens, forward and
backward in one loop, so that the logits of one part of the tokens live at a time, and nothing is computed twice.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import all_equations
from jscaler.capture.user_op import op_p
from jscaler.errors import check_count
from jscaler.ir import Op, PTensor
from jscaler.ir.walk import Sets, closure
from jscaler.lax_primitives import contracts
from jscaler.plans.argument_types import checked
from jscaler.plans.attention import holds_contraction
from jscaler.plans.column_row_pairs import column_factors
from jscaler.plans.factors import Dims, Factors, can_run_in_turn
from jscaler.plans.regions import recompute_rest, rows_of
from jscaler.plans.single import single
from jscaler.plans.vocab_parallel import tables_of_words
from jscaler.primitives import Planner, TimeSplit
from jscaler.rules.reached_factors import reached_factors

CO_SHARD, TOKENS = "co_shard", "tokens"


@checked
def co_shard(
    parts: int,
    on: Dims | Sequence[str] | None = None,
    plan: Callable[..., Any] | None = None,
    loss: bool = True,
    recompute: bool = True,
    vocabulary: Dims | None = None,
) -> Callable[..., None]:
    """``plan``, with heads, hidden units, and the tokens of the loss in ``parts`` that run one after another.

    Args:
        parts: how many; must divide what each device has of the heads, and of the hidden units.
        on: kernels whose columns are split, as for `tensor_parallel`.
        plan: the policy that splits and places the ops between devices; `single` by default.
        loss: whether the loss runs along the tokens.
        recompute: whether the parts are computed again for the backward pass, instead of the model's own checkpoints
            around them, if these hold no other work; else what they make is kept.
        vocabulary: tables whose logits the loss is made of, as for `vocab_parallel`.

    Raises (when the plan is made):
        UnknownNameError: no kernel matches.
        SplitError: heads or columns do not divide.

    Example:
        >>> lowered = train_step.under(plans.co_shard(2)).lower(state, batch)
        >>> [name for name in lowered.graph.loops if name.startswith("tokens")]  # of the loss, forward and backward
        ['tokens@head/dot']
    """
    inner = plan or single()
    check_count("co_shard: parts", parts)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        columns, _ = column_factors(graph, on, parts, "pass co_shard(on=...)", shared=False)
        table = _in_turn(graph, columns, parts)
        for op, name in table.items():
            graph.op_trans(op, TimeSplit(name, parts, CO_SHARD))
        if loss:
            for op, name in _in_turn(graph, _tokens(graph, tables_of_words(graph, vocabulary), parts), parts).items():
                if op not in table:
                    graph.op_trans(op, TimeSplit(name, parts, TOKENS))
        inner(graph, devices)
        if recompute and graph.calls:
            groups = _groups(graph, list(table))
            own = {op for group in groups for op in group}
            for group in groups:
                if _is_covered(graph, group, own):
                    graph.recompute(group, instead=True)
                else:
                    recompute_rest(graph, group)

    return policy


def _in_turn(graph: Planner, table: Factors, parts: int) -> Factors:
    """The forward ops of ``table`` that can run part by part; what takes a stack apart hands out parts of parameters."""
    forward = {op: name for op, name in table.items() if op.kind == "forward" and op.ranges != "apart"}
    return {op: name for op, name in forward.items() if can_run_in_turn(graph, op, name, parts)}


def _groups(graph: Planner, ops: Sequence[Op]) -> list[list[Op]]:
    """Ops in time that hand parts to each other, with what only they read (a norm): what is computed again at once."""
    own = set(ops)
    sets = Sets[Op]()
    for op in ops:
        for tensor in op.inputs:
            maker = graph.producer.get(tensor)
            if maker in own and maker is not None and (maker.call, maker.loop) == (op.call, op.loop):
                sets.join(maker, op)
    groups = [row for group in sets.among(ops) for row in rows_of(graph, group)]
    return [_with_preparation(graph, group, own) for group in groups if any(op.backward is not None for op in group)]


def _is_covered(graph: Planner, group: Sequence[Op], own: Set[Op]) -> bool:
    """Whether the model's regions around ``group`` hold no work beside ``own``: contractions, or ops of the user's."""
    regions = {region for op in group for region in op.remat}
    others = (op for op in graph.ops if op.kind == "forward" and op not in own and not regions.isdisjoint(op.remat))
    return bool(regions) and not any(op.body is not None and _works(op.body.jaxpr) for op in others)


def _works(jaxpr: core.Jaxpr) -> bool:
    eqns = list(all_equations(jaxpr))
    return contracts(eqns) or any(eqn.primitive is op_p for eqn in eqns)


def _with_preparation(graph: Planner, group: Sequence[Op], others: Set[Op]) -> list[Op]:
    """``group``, and what is made for it alone and is not of ``others``."""
    members = set(group)
    first = group[0]
    leaves = set(graph.outputs) | {t for loop in graph.loops.values() for t in (*loop.operands, *loop.returned)}
    for op in reversed(graph.ops):
        if op.kind == "forward" and op.call == first.call and op.loop == first.loop and op not in others:
            readers = [r for t in op.outputs for r in graph.consumers.get(t, ()) if r.kind == "forward"]
            if readers and all(r in members for r in readers) and leaves.isdisjoint(op.outputs):
                members.add(op)
    return [op for op in graph.ops if op in members]


def _tokens(graph: Planner, vocabulary: Sequence[tuple[PTensor, int]], parts: int) -> Factors:
    """The ops from the head to the loss, split along the tokens: the largest dim of the logits beside the vocabulary."""
    found: Factors = {}
    for tensor, dim in vocabulary:
        words = {op: name for op, name in graph.factor_of(tensor.name, dim).items() if op.kind == "forward"}
        for head in words:
            dims = graph.rule(head).results[0] if _is_head(graph, head, words[head]) else ()
            free = [i for i, names in enumerate(dims) if names and words[head] not in names]
            free = [i for i in free if head.outputs[0].shape[i] % parts == 0]
            if free:
                longest = max(free, key=lambda i: (head.outputs[0].shape[i], i))  # of equals, not the batch
                near = reached_factors(graph.graph, head.outputs[0], longest)
                found.update({op: near[op] for op in words if op in near and not _looks_up(graph, op, words[op])})
    return found


def _is_head(graph: Planner, op: Op, word: str) -> bool:
    return holds_contraction(op) and any(word in names for names in graph.rule(op).results[0])


def _looks_up(graph: Planner, op: Op, word: str) -> bool:
    """Whether ``op`` takes rows of a table: the vocabulary is gone in what it makes, and comes from no op's result."""
    if any(word in names for dims in graph.rule(op).results for names in dims):
        return False
    sources = [t for t, dims in zip(op.inputs, graph.rule(op).operands, strict=True) if any(word in n for n in dims)]
    return all(len(t.shape) == 2 and not _from_contraction(graph, t) for t in sources)


def _from_contraction(graph: Planner, tensor: PTensor) -> bool:
    def sources(tensor: PTensor) -> list[PTensor]:
        maker = graph.producer.get(tensor)
        return [t for t in (maker.inputs if maker else ()) if t.shape]

    makers = (graph.producer.get(t) for t in closure([tensor], sources))
    return any(maker is not None and holds_contraction(maker) for maker in makers)
