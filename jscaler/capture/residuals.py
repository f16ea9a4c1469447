"""What a backward reads of its forward: its inputs (and computes the rest again), or residuals that the forward saves.

    inputs   y = f(x)             dx = vjp(f)(x, dy)
    saved    y, r = f*(x)         dx = f'(r, dy)         r: PTensors "f:residual:0", …

Saved is the default where the body holds a ``custom_vjp``: its forward need not equal its primal (a flash attention also
returns the log-sum-exp), so the one could not be merged with the other, and would run twice.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jscaler.capture.bodies import BodyTable, holds_custom_vjp
from jscaler.errors import PlanError
from jscaler.ir import FactorNames, Graph, Op, PTensor, Rule
from jscaler.ir.op import Residuals


def default_residuals(op: Op) -> Residuals:
    """How ``op`` serves its backward where the plan does not say."""
    return "saved" if op.body is not None and holds_custom_vjp(op.body.jaxpr) else "inputs"


def with_backward_bodies(
    graph: Graph,
    bodies: BodyTable,
    residuals: Mapping[str, Residuals] | None = None,
    split: Mapping[str, Iterable[str]] | None = None,
) -> Graph:
    """``graph`` with every backward handle given its body, its inputs pruned to what that body reads.

    Args:
        residuals: how the plan wants ops to serve their backward, by path.
        split: by path the factors that the plan splits.

    Raises:
        UnknownNameError: no such op.
        PlanError: residuals are to be saved, and a factor that the plan splits is blocked by that.
    """
    wanted, split = residuals or {}, split or {}
    for path in wanted:
        _ = graph[path]
    forwards: dict[str, Op] = {}
    saved: dict[str, Op] = {}
    handles = {op.forward.path: op for op in graph.ops if op.forward is not None and op.body is None}
    ops = []
    for op in graph.ops:
        if op.path in handles and wanted.get(op.path, op.residuals) == "saved":
            pair = saved_pair(graph.rule(op), bodies, op, handles[op.path])
            lost = _lost(graph, op, pair, split.get(op.path))
            if not lost:
                forwards[op.path], saved[handles[op.path].path] = pair
            elif op.path in wanted:
                raise PlanError(
                    f"'{op.path}' is to save its residuals, but then it cannot be split along {lost}; "
                    f"say graph.residuals('{op.path}', 'inputs')"
                )
        if op.path in saved:
            ops.append(saved[op.path])
        elif op.forward is not None and op.body is None:
            body, kept = bodies.backward(op.forward, op)
            ops.append(dataclasses.replace(op, body=body, inputs=tuple(op.inputs[i] for i in kept)))
        else:
            ops.append(forwards.get(op.path, op))
    return dataclasses.replace(graph, ops=tuple(ops))


def saved_pair(rule: Rule, bodies: BodyTable, op: Op, handle: Op) -> tuple[Op, Op]:
    """The op of ``rule`` that hands out residuals, and its backward that reads them."""
    made = bodies.saved(op, handle)
    tensors = tuple(PTensor(op.path + f":residual:{i}", aval, "residual") for i, aval in enumerate(made.residuals))
    nameless = tuple(tuple((("", size),) if size > 1 else () for size in t.shape) for t in tensors)
    names = FactorNames((*rule.names().tensors, *nameless), tuple(rule.factors))
    forward = dataclasses.replace(
        op, body=made.forward, outputs=(*op.outputs, *tensors), residuals="saved", named=names, primal=op.body
    )
    full = (*op.inputs, *forward.outputs, *(t for _, t in handle.cotangents))
    inputs = tuple(full[i] for i in made.kept)
    return forward, dataclasses.replace(handle, body=made.backward, inputs=inputs, forward=forward)


def _lost(graph: Graph, op: Op, pair: tuple[Op, Op], split: Iterable[str] | None) -> str:
    """A factor that can be split only as long as residuals are not saved, and why; empty if there is none.

    It counts if the plan splits it; if the plan says nothing of the op, every factor does.
    """
    before, after = graph.rule(op), graph.rule(pair[0])
    for name in before.factors if split is None else split:
        old, new = before.factors[name], after.factors.get(name)
        if not old.splittable or (split is None and old.kind == "blocked"):
            continue
        shares = [[rule.shares.get((name, i)) for i in range(len(op.outputs))] for rule in (before, after)]
        both_open = new is not None and "blocked" not in (old.kind, new.kind)
        reopened = new is not None and new.splittable and split is not None
        if not (both_open and shares[0] == shares[1]) and not (reopened and not both_open):
            return f"'{name}'" + (f" ({new.reason})" if new and new.reason else "")
    return ""
