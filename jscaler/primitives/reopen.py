"""Re-open ops: where a plan splits a factor that inner reductions block, the op is cut there into several ops.

It happens after the policy and after autodiff, so that custom derivatives stay whole: forward and backward bodies are
cut independently, each where it reduces. The plan keeps naming the op that the policy knew; here its decisions are
dealt to the pieces.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import make_jaxpr
from jscaler.capture.names import PathNames
from jscaler.ir import Graph, Op, PTensor, Rule
from jscaler.primitives.algorithms import GridAxis
from jscaler.primitives.expand import expand_op
from jscaler.primitives.held_up import held_up
from jscaler.primitives.plan import Assign, Decision, OnDevices, Order, Plan, Trans
from jscaler.rules.rule_book import RuleBook


@dataclass(frozen=True)
class Reopened:
    """A graph whose ops can all be split as the plan says.

    Attributes:
        plan: its decisions, on the ops of this graph.
        pieces: path of an op that was cut -> paths of the ops that stand for it.
    """

    graph: Graph
    plan: Plan
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def reopen(graph: Graph, plan: Plan, book: RuleBook, bodies: BodyTable) -> Reopened:
    """Cut every op that ``plan`` splits along a blocked factor, backward ops that mirror it, and what holds shards up."""
    shards = held_up(graph, plan, book)
    grids = {d.op: d.axes for d in plan.decisions if isinstance(d, Trans)}
    ops: list[Op] = []
    pieces: dict[str, tuple[Op, ...]] = {}
    for op in graph.ops:
        like = op.forward or op.again  # whose grid it mirrors
        mirrored = grids.get(like.path, ()) if like is not None else ()
        made = _opened(op, grids.get(op.path, mirrored), shards.get(op.path, ()), book, bodies)
        if op.again is not None and op.again.path in pieces:  # the clones of the pieces
            originals = pieces[op.again.path]
            made = tuple(dataclasses.replace(a, again=b) for a, b in zip(made, originals, strict=True))
        if len(made) > 1:
            pieces[op.path] = made
        ops += made
    if not pieces:
        return Reopened(graph, plan)
    cut_graph = dataclasses.replace(graph, ops=tuple(ops))
    decisions = tuple(d for decision in plan.decisions for d in _dealt(decision, pieces, book))
    paths = {path: tuple(op.path for op in made) for path, made in pieces.items()}
    return Reopened(cut_graph, dataclasses.replace(plan, decisions=decisions), paths)


def _opened(op: Op, axes: Sequence[GridAxis], shards: tuple[str, ...], book: RuleBook, bodies: BodyTable) -> tuple[Op, ...]:
    """The ops that stand for ``op``: the steps of an algorithm, each cut where it reduces; or free for ``shards``."""
    if shards and not axes:
        return cut_op(op, shards, book, bodies)
    steps: tuple[Op, ...] = (op,)
    for axis in axes:
        if axis.algorithm is not None:
            steps = expand_op(op, axis, book, bodies) or steps
    made: list[Op] = []
    for step in steps:
        factors = _to_open(step, axes, book)
        made += cut_op(step, factors, book, bodies) if factors else (step,)
    return tuple(made)


def _to_open(op: Op, axes: Sequence[GridAxis], book: RuleBook) -> tuple[str, ...]:
    """The factors along which ``op`` is to be split and cannot be as it is; all its split factors, if any is so."""
    wanted = tuple(dict.fromkeys(a.factor for a in axes if a.factor is not None and a.parts > 1))
    factors = book.rule(op).factors if wanted else {}
    wanted = tuple(f for f in wanted if f in factors and factors[f].splittable)
    return wanted if any(factors[f].kind == "blocked" for f in wanted) else ()


def cut_op(op: Op, factors: Sequence[str], book: RuleBook, bodies: BodyTable) -> tuple[Op, ...]:
    """The ops that stand for ``op`` when ``factors`` are opened."""
    assert op.body is not None
    pieces = book.cut(op, tuple(factors))
    source = book.analysis(op).jaxpr
    known: dict[core.Var, PTensor] = dict(zip(source.invars, op.inputs, strict=True))
    wanted: dict[object, list[PTensor]] = {}
    for atom, tensor in zip(source.outvars, op.outputs, strict=True):
        wanted.setdefault(_key(atom), []).append(tensor)
    names, made = PathNames(), []
    for piece in pieces:
        path = names.unique(op.path + "/" + piece.name)
        outputs, outvars, named = [], [], list(piece.named.tensors[: len(piece.jaxpr.invars)])
        inputs = tuple(known[v] for v in piece.jaxpr.invars)
        for i, atom in enumerate(piece.jaxpr.outvars):
            tensors = wanted.pop(_key(atom), None) or [PTensor(path + f":{i}", atom.aval, op.outputs[0].role)]
            outputs += tensors
            outvars += [atom] * len(tensors)
            named += [piece.named.tensors[len(piece.jaxpr.invars) + i]] * len(tensors)
            if isinstance(atom, core.Var):
                known.setdefault(atom, tensors[0])
        body = bodies.intern(make_jaxpr(piece.jaxpr.eqns, piece.jaxpr.invars, outvars, piece.jaxpr))
        whole = dataclasses.replace(piece.named, tensors=tuple(named))
        made.append(
            dataclasses.replace(op, path=path, inputs=inputs, outputs=tuple(outputs), body=body, named=whole, backward=None)
        )
    assert not wanted, f"{op.path}: no piece makes {[t.name for ts in wanted.values() for t in ts]}"
    return tuple(made)


def _key(atom: core.Var | core.Literal) -> object:
    return atom if isinstance(atom, core.Var) else id(atom)


def _dealt(decision: Decision, pieces: Mapping[str, tuple[Op, ...]], book: RuleBook) -> list[Decision]:
    """``decision`` on each piece of the op that it names."""
    if isinstance(decision, Trans) and decision.op in pieces:
        return [
            Trans(op.path, tuple(_axis(a, book.rule(op)) for a in decision.axes), _chunks(decision, book.rule(op)))
            for op in pieces[decision.op]
        ]
    if isinstance(decision, Assign) and decision.op in pieces:
        return [dataclasses.replace(decision, op=op.path) for op in pieces[decision.op]]
    if isinstance(decision, OnDevices):
        return [dataclasses.replace(decision, ops=tuple(p for path in decision.ops for p in _paths(path, pieces)))]
    if isinstance(decision, Order):
        before, after = (_paths(path, pieces) for path in (decision.before, decision.after))
        return [Order(a, b) for a in before for b in after]
    return [decision]


def _axis(axis: GridAxis, rule: Rule) -> GridAxis:
    """A piece that lacks the factor, or needs it whole, is copied along the axis."""
    factor = rule.factors.get(axis.factor) if axis.factor is not None else None
    if factor is None or factor.kind == "blocked" or (axis.algorithm is not None and factor.size % axis.parts):
        return GridAxis(None, axis.parts)
    return dataclasses.replace(axis, algorithm=None)


def _chunks(decision: Trans, rule: Rule) -> tuple[GridAxis, ...]:
    """A piece that lacks the factor, or needs it whole, runs at once."""
    return tuple(a for a in decision.chunks if a.factor in rule.factors and rule.factors[a.factor].kind != "blocked")


def _paths(path: str, pieces: Mapping[str, tuple[Op, ...]]) -> tuple[str, ...]:
    return tuple(op.path for op in pieces[path]) if path in pieces else (path,)
