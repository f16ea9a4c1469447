"""Vocabulary parallelism: the embedding, the logits and the cross entropy split over the vocabulary.
(Shoeybi et al., Megatron-LM, 2019, section 3, "input embedding" and "output embedding".)

::

    tokens ──► look-up in own rows, 0 elsewhere ──► Σ ──► …
    …  ──► logits [:, own words] ──► max, Σ exp, own label's logit ──► combined over devices ──► loss

The look-up ends in one all-reduce of activations; the cross entropy reduces one maximum and two sums per token, and never
gathers logits. The gradients of embedding and head stay with their rows.

Words that do not divide (GPT-2's 50,257) lie in parts of which the last is shorter; all devices compute as if it were not,
and what is too much counts nowhere. No array can lie so between steps: table and moments lie in equal parts of another dim,
and once a step the table is exchanged for its use, and its gradient for the update.
"""

from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jscaler.errors import PlanWarning, warn
from jscaler.ir import PTensor
from jscaler.ir.walk import closure
from jscaler.materialize.layout import ceil_blocks
from jscaler.plans.argument_types import checked
from jscaler.plans.attention import holds_contraction
from jscaler.plans.column_row_pairs import meets_rows, products_of, weights_of
from jscaler.plans.factors import Dims, Factors, is_much, reached, required, select, split
from jscaler.primitives import Planner

# Tables of words: rows of an embedding, columns of an untied head.
VOCABULARY: Dims = {
    "*/embed/embedding": -2,
    "*/embedding/embedding": -2,
    "*/embed_tokens/embedding": -2,
    "*/wte/embedding": -2,
    "*/head/kernel": -1,
    "*/lm_head/kernel": -1,
    "*/logits/kernel": -1,
}


def tables_of_words(graph: Planner, vocabulary: Dims | None = None) -> list[tuple[PTensor, int]]:
    """Embeddings and heads, and which dims of theirs are words: what matches, or by default is found.

    By default those that are called as Flax models call them, and each table whose rows are looked up, and that, or a
    kernel with as many columns, makes logits.
    """
    if vocabulary is not None:
        return select(graph, vocabulary)
    return [*graph.graph.once("tables of words", lambda: _found(graph))]


def _found(graph: Planner) -> list[tuple[PTensor, int]]:
    found = select(graph, VOCABULARY)
    weights = weights_of(graph)
    tables = [t for t in graph.inputs if t in weights and _is_looked_up(graph, t, weights)]
    sizes = {t.shape[0] for t in tables}
    heads = [
        (tensor, dim)
        for tensor in graph.inputs
        if tensor in weights
        for dim, size in enumerate(tensor.shape)
        if size in sizes and _makes_logits(graph, tensor, dim, weights)
    ]
    logits = {tensor.shape[dim] for tensor, dim in heads}
    found += [(t, 0) for t in tables if t.shape[0] in logits] + heads
    return list({tensor: (tensor, dim) for tensor, dim in reversed(found)}.values())[::-1]


def word_factors(graph: Planner, words: Sequence[tuple[PTensor, int]], parts: int) -> Factors:
    """The factor of every op that words reach; of updates of tables whose words do not divide another dim's, if one does.

    Warns:
        PlanWarning: a table has too few words for a part each, and stays whole.
    """
    few = [(t, dim) for t, dim in words if not ceil_blocks(t.shape[dim], parts)[-1]]
    if is_much(graph, [tensor for tensor, _ in few]):
        told = ", ".join(f"'{t.name}' of {t.shape}" for t, _ in few)
        warn(
            f"tables of words stay whole, since {parts} devices cannot have a part each: {told}; give them words that "
            "nothing looks up, and leave those out of the loss",
            PlanWarning,
        )
    words = [pair for pair in words if pair not in few]
    table = reached(graph, words, parts, unequal=True)
    for tensor, dim in words:
        others = [d for d, size in enumerate(tensor.shape) if d != dim and size % parts == 0]
        if tensor.shape[dim] % parts and others:
            other = graph.factor_of(tensor.name, others[-1])
            updates = [op for op in graph.factor_of(tensor.name, dim) if op.kind == "update"]
            table |= {op: other[op] for op in updates if op in other}
    return table


def _makes_logits(graph: Planner, kernel: PTensor, dim: int, weights: set[PTensor]) -> bool:
    """Whether a product with ``kernel`` leaves ``dim``, and no other kernel contracts that."""
    products = products_of(graph, kernel, weights)
    reach = graph.factor_of(kernel.name, dim) if products else {}
    left = (graph.rule(op).factors[name].kind == "parallel" for op, name in reach.items() if op.path in products)
    return any(left) and not meets_rows(graph, reach, weights, products)


def _is_looked_up(graph: Planner, table: PTensor, weights: set[PTensor]) -> bool:
    """Whether whole numbers pick rows of ``table``, or of a cast of it, which parts do together: sums with zeros.

    A penalty on weights sums rows, too, and picks none.
    """

    def made_of(tensor: PTensor) -> Iterable[PTensor]:
        return (t for op in graph.consumers.get(tensor, ()) for t in op.outputs if op.kind == "forward" and t in weights)

    for tensor in (t for t in closure([table], made_of) if len(t.shape) == 2):
        for op in graph.consumers.get(tensor, ()):
            picks = any(jnp.issubdtype(t.dtype, jnp.integer) for t in op.inputs)
            if op.kind == "forward" and picks and not holds_contraction(op):
                rule = graph.rule(op)
                rows = rule.operands[op.inputs.index(tensor)][0]
                if rows and rule.factors[rows[0]].kind == "reduction":
                    return True
    return False


@checked
def vocab_parallel(vocabulary: Dims | None = None) -> Callable[..., None]:
    """Split the vocabulary of each table that matches, and all ops that it reaches, over all devices.

    Args:
        vocabulary: ``{pattern: dim}`` of embeddings and heads among the step's inputs; by default as Flax models name
            them, ``{"*/embed/embedding": -2, "*/lm_head/kernel": -1, …}``, and tables whose rows are looked up, with
            the kernels that make logits of as many words.

    Raises (when the plan is made):
        UnknownNameError: no table matches.

    Example:
        >>> planned = train_step.under(plans.vocab_parallel({"*/words": 0})).lower(state, batch).plan
        >>> planned.plan.split_factors["loss/gather"]  # rows of the table
        ['c']
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        leaves = tables_of_words(graph, vocabulary)
        if not leaves:
            leaves = required(graph, vocabulary or VOCABULARY, "pass vocab_parallel(vocabulary=...)")
        table = word_factors(graph, leaves, devices.size)
        split(graph, devices, table, unequal=table)

    return policy
