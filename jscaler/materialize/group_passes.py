"""The passes over a graph whose ops lie on several device groups, so that no more crosses than has to.

fences_apart           a fence in front of ops on several groups becomes one on each
made_where_read        what depends on inputs, literals or the micro-batch's number alone is made by every group that reads
joined_behind_loops    gradients of a parameter that several stages use add up for each; behind the loop they are joined
joined_per_group       gradients of what several groups read (an encoder's result, a tied table) cross as one per group
summed_per_group       scalars of all leaves (a global norm) cross as one per group
one_of_equals          of equal results of an update one crosses
stages_of_all          ops that the plan does not place have the stage of ops around them
inputs_where_read      arguments that the step does not change lie on all groups that read them
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence, Set

from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import atom_key, equal_results, evaluate, make_jaxpr, shape, swapped
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Body, Carry, FactorNames, Graph, Loop, Op, PTensor
from jscaler.ir.kinds import learned
from jscaler.ir.loop import chain_of
from jscaler.ir.name import group_mark, turn_mark
from jscaler.ir.passes import Pass
from jscaler.ir.walk import closure, grouped
from jscaler.lax_primitives import known
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.inputs_where_read import inputs_where_read
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.op_stages import stages_by_neighbours


def fences_apart(at: OnGroups) -> OnGroups:
    """A fence in front of ops on several groups (it fetches sharded parameters) becomes one on each. It moves nothing."""
    home, _ = _homes(at)
    if home is None or not any(op.anywhere == "fence" for op in at.graph.ops):
        return at
    found, renamed = list[Op](), dict[tuple[PTensor, DeviceMesh], PTensor]()
    for op in at.graph.ops:
        found += _fence_by_group(op, home, at, renamed) if op.anywhere == "fence" else [op]
    ops = [_reading(op, tuple(renamed.get((t, home.get(op.path)), t) for t in op.inputs)) for op in found]  # type: ignore[arg-type]
    return _with_ops(at, ops)


def _fence_by_group(
    op: Op,
    home: Mapping[str, DeviceMesh],
    at: OnGroups,
    renamed: dict[tuple[PTensor, DeviceMesh], PTensor],
) -> list[Op]:
    """A fence for each group whose ops read what comes out; ``renamed`` says what a group reads in the place of what."""
    pairs = list(zip(op.inputs, op.outputs, strict=True))
    by_group: dict[DeviceMesh, list[tuple[PTensor, PTensor]]] = {}
    unread = []
    for source, made in pairs:
        groups = list(dict.fromkeys(home[reader.path] for reader in at.graph.flow.readers(made)))
        unread += [] if groups else [(source, made)]
        for group in groups:
            by_group.setdefault(group, []).append((source, made))
    if len(by_group) < 2:
        return [op]
    found = []
    for number, (group, own) in enumerate(by_group.items()):
        taken = [*own, *unread]
        outputs = tuple(made if not number else dataclasses.replace(made, name=made.name + _on(group)) for _, made in taken)
        renamed.update({(made, group): new for (_, made), new in zip(taken, outputs, strict=True) if new is not made})
        path = op.path if not number else op.path + _on(group)
        fence = dataclasses.replace(op, path=path, inputs=tuple(source for source, _ in taken), outputs=outputs)
        found.append(with_fence_body(fence, at.bodies))
    return found


def made_where_read(at: OnGroups) -> OnGroups:
    """What inputs, literals and the micro-batch's number are enough for is made where it is read. It is not sent."""
    home, placed = _homes(at)
    if home is None:
        return at
    copies = _Copies(at.graph, home, placed)
    return _with_ops(at, copies.ops(), copies.moved, copies.loops)


def joined_behind_loops(at: OnGroups) -> OnGroups:
    """Gradients of what several groups use (a tied table) add up on each group. Behind the loop one joins them once.

    So do those of one group between which a micro-batch goes through others: the first would wait there for the last, for
    every micro-batch under way.
    """
    home, _ = _homes(at)
    if home is None:
        return at
    graph, joins = at.graph, list[Op]()
    for loop in [loop for loop in graph.loops.values() if loop.time and loop.parent is None]:
        apart = _Apart(graph, home, loop, at)
        graph, joins = apart.graph(), [*joins, *apart.behind]
    readers = {reader.path for join in joins for t in join.outputs for reader in graph.consumers.get(t, ())}
    return at.with_graph(graph, unsettled=readers)


def joined_per_group(at: OnGroups) -> OnGroups:
    """Gradients that several groups have for one tensor are added on each first, where it has several."""
    home, placed = _homes(at)
    if home is None:
        return at
    found = list[Op]()
    for op in at.graph.ops:
        by_group: dict[DeviceMesh, list[PTensor]] = {}
        for tensor in op.inputs if _is_join(op) and op.path not in placed else ():
            maker = at.graph.flow.maker(tensor)
            by_group.setdefault(home[maker.path if maker is not None else op.path], []).append(tensor)
        if 1 < len(by_group) < len(op.inputs):
            parts = list[PTensor]()
            for group, own in by_group.items():
                mark = _on(group) + ("@behind" if op.loop is None else "")
                found += [_join_of(op, own, mark, at.bodies)] if len(own) > 1 else []
                parts += found[-1].outputs if len(own) > 1 else own
            op = _join_of(op, parts, "", at.bodies)
        found.append(op)
    return _with_ops(at, found)


def _join_of(join: Op, parts: Sequence[PTensor], mark: str, bodies: BodyTable) -> Op:
    """``join`` of some of its operands; ``mark`` follows its name."""
    made = dataclasses.replace(join.outputs[0], name=join.outputs[0].name + mark)
    body = bodies.join(made.aval, len(parts))
    named = join.named and FactorNames(join.named.tensors[-1:] * (len(parts) + 1), join.named.reserved)
    return dataclasses.replace(join, path=join.path + mark, inputs=tuple(parts), outputs=(made,), body=body, named=named)


def summed_per_group(at: OnGroups) -> OnGroups:
    """Scalars that are added up (a global norm over all leaves) are added on their group first. One per group crosses."""
    home, placed = _homes(at)
    if home is None:
        return at
    found = list[Op]()
    sum_of = functools.cache(_scalar_sum)
    for op in at.graph.ops:
        parts = sum_of(op.body) if op.path not in placed and op.kind == "update" and op.body is not None else None
        found += [op] if parts is None else _by_group(op, *parts, home, at)
    return _with_ops(at, found)


def one_of_equals(at: OnGroups) -> OnGroups:
    """Of equal results of an update (a step's size, made for each leaf) readers read the first. So one crosses."""
    home, _ = _homes(at)
    if home is None:
        return at
    same: dict[PTensor, PTensor] = {}
    first = functools.cache(_first_equals)
    for op in at.graph.ops:
        if op.kind == "update" and op.body is not None and len(op.outputs) > 1:
            same.update({op.outputs[n]: op.outputs[place] for n, place in first(op.body).items()})
    ops = (_reading(op, tuple(same.get(t, t) for t in op.inputs)) if op.kind == "update" else op for op in at.graph.ops)
    return _with_ops(at, list(ops))


def _first_equals(body: Body) -> dict[int, int]:
    """For results of a body that equal one before: their places, and that one's."""
    first: dict[object, int] = {}
    equal = equal_results(body.jaxpr.eqns)
    places = [first.setdefault(atom_key(swapped(equal, atom)), n) for n, atom in enumerate(body.jaxpr.outvars)]
    return {n: place for n, place in enumerate(places) if n != place}


def stages_of_all(at: OnGroups) -> OnGroups:
    """Ops that the plan does not place have the stage of what they read on their group, or else of who reads them."""
    given = {path: home.stage for path, home in at.homes.items() if home.stage is not None}
    stages = stages_by_neighbours(at.graph, at.of_op, given) if given else {}
    more = {path: dataclasses.replace(at.homes[path], stage=stage, stage_by=by) for path, (stage, by) in stages.items()}
    return dataclasses.replace(at, homes={**at.homes, **more}) if more else at


GROUP_PASSES: tuple[Pass[OnGroups], ...] = (
    fences_apart,
    made_where_read,
    joined_behind_loops,
    joined_per_group,
    summed_per_group,
    one_of_equals,
    stages_of_all,
    inputs_where_read,
)


def _homes(at: OnGroups) -> tuple[Mapping[str, DeviceMesh] | None, Set[str]]:
    """The group of every op, and the ops that the plan itself places; None where there is one group."""
    return (None, frozenset()) if len(at.groups.meshes) == 1 else (at.of_op, at.groups.of.keys())


def _with_ops(
    at: OnGroups, ops: Sequence[Op], moved: Mapping[str, DeviceMesh] = {}, loops: Mapping[str, Loop] = {}
) -> OnGroups:
    """``at`` with other ops; itself, where they are the same, of which more is known already.

    Args:
        moved: the groups of ops that are made for one.
        loops: loops that are others now.
    """
    if len(ops) == len(at.graph.ops) and all(new is old for new, old in zip(ops, at.graph.ops, strict=True)):
        return at
    return at.with_graph(dataclasses.replace(at.graph, ops=tuple(ops), loops={**at.graph.loops, **loops}), moved)


def _reading(op: Op, inputs: tuple[PTensor, ...]) -> Op:
    """``op``, which reads ``inputs``; itself, if it does."""
    return op if inputs == op.inputs else dataclasses.replace(op, inputs=inputs)


def _on(group: DeviceMesh) -> str:
    return group_mark(group.devices)


class _Copies:
    """The ops of a graph, and copies of cheap ones of what all groups know, one for each group that reads them."""

    def __init__(self, graph: Graph, home: Mapping[str, DeviceMesh], placed: Set[str]):
        self._graph, self._home, self._placed = graph, home, placed
        self._free = self._known()
        self._of: dict[str, list[DeviceMesh]] = {}  # of an op that is copied: the groups that read it
        self.moved: dict[str, DeviceMesh] = {}  # the group of each
        self.loops: dict[str, Loop] = {}  # those that take a copy
        self._on = self._groups_of_loops()
        ends = [(t, self._on.get(loop.name)) for loop in graph.loops.values() for t in loop.operands]
        self._taken = grouped((t, group) for t, group in ends if group is not None)
        inside = {t for loop in graph.loops.values() for t in (*loop.inner, *loop.returned, *loop.results)}
        self._held = inside | {t for t, group in ends if group is None} | {*graph.outputs}

    def _groups_of_loops(self) -> dict[str, DeviceMesh]:
        """The group of each loop that is on one."""
        groups: dict[str, set[DeviceMesh]] = {}
        for op in self._graph.ops:
            for name in chain_of(op.loop, self._graph.loops):
                groups.setdefault(name, set()).add(self._home[op.path])
        return {name: next(iter(own)) for name, own in groups.items() if len(own) == 1}

    def _known(self) -> set[str]:
        """The ops that every group can run by itself: paths."""
        graph = self._graph
        trained, arrays = {t for call in graph.calls for t in call.wrt}, learned(graph)
        given = [*(t for t, _ in graph.constants), *graph.inputs]
        tensors = {t for t in given if t not in trained}
        unlearned = {t for t in given if t not in arrays}  # an optimizer's moments are no input to share
        ops: set[str] = set()
        for op in graph.ops:
            if op.body is None or op.again is not None or op.body.jaxpr.effects or _contracts(op):
                continue
            known = unlearned if op.kind == "update" else tensors
            if all(t in known for t in op.inputs):
                made = [t for t in op.outputs if t not in trained]
                made += [piece for t in made for piece in graph.flow.targets(t, "slice")]
                ops.add(op.path)
                tensors.update(made)
                unlearned.update(made if all(t in unlearned for t in op.inputs) else ())
        return ops - self._of_updates_alone(ops)

    def _of_updates_alone(self, ops: Set[str]) -> set[str]:
        """Those of ``ops`` outside of losses that no loss reads: step sizes of an optimizer are sent, and masks are not."""
        found: set[str] = set()
        for op in reversed(self._graph.ops):
            if op.path in ops and op.kind == "update":
                readers = [r for t in op.outputs for r in self._graph.consumers.get(t, ())]
                if not any(r.kind != "update" or (r.path in ops and r.path not in found) for r in readers):
                    found.add(op.path)
        return found

    def _groups(self, op: Op) -> list[DeviceMesh]:
        """The groups that read what ``op`` makes: its own first, if the plan says where it runs."""
        readers = [r for t in op.outputs for r in self._graph.consumers.get(t, ())]
        found = [g for r in readers for g in (self._of[r.path] if r.path in self._of else [self._home[r.path]])]
        taken = [group for t in op.outputs for group in self._taken.get(t, ())]
        found += taken if op.loop is not None else []  # in front of all loops it is sent once, and not for each micro-batch
        own = [self._home[op.path]]
        is_held = any(t in self._held for t in op.outputs) or (bool(taken) and op.loop is None)
        first, last = (own if op.path in self._placed else [], own if is_held or not found else [])
        return list(dict.fromkeys([*first, *found, *last]))

    def ops(self) -> list[Op]:
        for op in reversed(self._graph.ops):
            if op.path in self._free:
                self._of[op.path] = self._groups(op)
        copies: dict[tuple[PTensor, DeviceMesh], PTensor] = {}
        made: list[Op] = []
        for op in self._graph.ops:
            for number, group in enumerate(self._of.get(op.path, [self._home[op.path]])):
                if op.path in self._of:
                    self.moved[op.path + _on(group) * bool(number)] = group
                here = op.renamed({t: copies[t, group] for t in op.inputs if (t, group) in copies})
                if number == 0:
                    made.append(here)
                    continue
                outputs = tuple(dataclasses.replace(t, name=t.name + _on(group)) for t in op.outputs)
                copies.update({(old, group): new for old, new in zip(op.outputs, outputs, strict=True)})
                made.append(dataclasses.replace(here, path=op.path + _on(group), outputs=outputs, backward=None))
        for name, group in self._on.items():
            loop = self._graph.loops[name]
            table = {t: copies[t, group] for t in loop.operands if (t, group) in copies}
            self.loops.update({name: loop.renamed(table, {})} if table else {})
        return made


def _contracts(op: Op) -> bool:
    assert op.body is not None
    return any(known(e.primitive).role in ("contracts", "alone") for e in op.body.jaxpr.eqns)


class _Apart:
    """A graph whose loop over groups carries a sum for each stage, and turn, that adds to it, where it had one for all."""

    def __init__(self, graph: Graph, home: Mapping[str, DeviceMesh], loop: Loop, at: OnGroups):
        self._graph, self._home, self._loop, self._bodies = graph, home, loop, at.bodies
        self._gone: set[str] = set()
        self._inside: list[Op] = []
        self._before: list[Op] = []
        self.behind: list[Op] = []

    def graph(self) -> Graph:
        carries = [new for carry in self._loop.carries for new in self._carries(carry)]
        if not self._gone:
            return self._graph
        loops = {**self._graph.loops, self._loop.name: dataclasses.replace(self._loop, carries=tuple(carries))}
        ops = [op for op in self._graph.ops if op.path not in self._gone]
        body = [i for i, op in enumerate(ops) if self._loop.name in chain_of(op.loop, self._graph.loops)]
        first, last = body[0], body[-1] + 1
        ordered = (*ops[:first], *self._before, *ops[first:last], *self._inside, *self.behind, *ops[last:])
        return dataclasses.replace(self._graph, ops=ordered, loops=loops)

    def _carries(self, carry: Carry) -> list[Carry]:
        start = self._graph.producer.get(carry.init)
        added = self._added(carry)
        by_place: dict[tuple[DeviceMesh, Op, int], list[PTensor]] = {}
        summands = [(tensor, more) for more in added for tensor in self._summands(more)]
        for tensor, more in sorted(summands, key=lambda pair: self._first_use(pair[0])):
            group = self._home[self._maker(tensor).path]
            stages = [parts for (other, turn, _), parts in by_place.items() if (other, turn) == (group, more)]
            fit = (i for i, parts in enumerate(stages) if not any(self._others_between(group, t, tensor) for t in parts))
            place = next(fit, len(stages))
            by_place.setdefault((group, more, place), []).append(tensor)
        if start is None or len(by_place) < 2:
            return [carry]
        joins = {more: join for more in added if (join := self._join(more)) is not None}
        self._gone |= {start.path, *(op.path for op in (*added, *joins.values()))}
        found = [
            self._one(carry, more, joins.get(more), start, _on(group) + (f"#{place}" if place else ""), parts)
            for (group, more, place), parts in by_place.items()
        ]
        finals = tuple(c.final for c in found)
        body = self._bodies.join(carry.final.aval, len(finals))
        like = next(iter(joins.values()), added[0])
        self.behind.append(
            Op(like.path + "@behind", like.kind, finals, (carry.final,), body, call=like.call, loop=self._loop.parent)
        )
        return found

    def _others_between(self, group: DeviceMesh, *tensors: PTensor) -> bool:
        """Whether what makes one of two tensors waits for another group, and that for what makes the other."""
        made, operands = self._graph.producer, self._graph.flow.operands
        for first, last in itertools.permutations(tensors):
            apart = [t for t in closure([last], operands) if t in made and self._home[made[t].path] != group]
            if any(made.get(t) == self._maker(first) for t in closure(apart, operands)):
                return True
        return False

    def _added(self, carry: Carry) -> list[Op]:
        """The ops that add to ``carry``, one for each turn of an iteration, first ones first; none if it is read else."""
        found: list[Op] = []
        tensor = carry.out
        while tensor != carry.inside:
            more = self._graph.producer.get(tensor)
            if more is None or more.anywhere != "sum" or len(self._graph.consumers.get(tensor, ())) > bool(found):
                return []
            found.append(more)
            tensor = more.inputs[0]
        return found[::-1] if len(self._graph.consumers.get(tensor, ())) == 1 else []

    def _join(self, more: Op) -> Op | None:
        """The join of cotangents whose result alone ``more`` adds."""
        join = self._graph.producer.get(more.inputs[1])
        return join if join is not None and _is_join(join) and len(self._graph.consumers[join.outputs[0]]) == 1 else None

    def _summands(self, more: Op) -> tuple[PTensor, ...]:
        join = self._join(more)
        return more.inputs[1:] if join is None else join.inputs

    def _maker(self, gradient: PTensor) -> Op:
        maker = self._graph.flow.maker(gradient)
        assert maker is not None
        return maker

    def _first_use(self, gradient: PTensor) -> int:
        """The place of the forward op whose backward makes it: where the parameter is read first it lies."""
        maker = self._maker(gradient)
        return self._graph.position.get((maker.forward or maker).path, len(self._graph.ops))

    def _one(self, carry: Carry, more: Op, join: Op | None, start: Op, on: str, parts: Sequence[PTensor]) -> Carry:
        """The sum of what one stage makes at one turn; ``on`` names its group."""
        mark = turn_mark(more.turn) + on
        init, inside, out, final = (dataclasses.replace(t, name=t.name + mark) for t in carry.tensors)
        part = parts[0]
        if len(parts) > 1:
            assert join is not None
            self._inside.append(_join_of(join, parts, on, self._bodies))
            (part,) = self._inside[-1].outputs
        self._before.append(dataclasses.replace(start, path=start.path + mark, outputs=(init,)))
        self._inside.append(dataclasses.replace(more, path=more.path + on, inputs=(inside, part), outputs=(out,)))
        return Carry(init, inside, out, final, carry.is_sum)


def _is_join(op: Op) -> bool:
    """Whether ``op`` adds up cotangents, as autodiff has it do."""
    if op.kind != "backward" or op.forward is not None or op.again is not None or op.body is None or op.anywhere:
        return False
    names = [known(e.primitive).name for e in op.body.jaxpr.eqns]
    return len(op.inputs) > 1 and len(op.outputs) == 1 and bool(names) and set(names) <= {"add", "add_any"}


def _scalar_sum(body: Body) -> tuple[core.Var, list[core.Var], list[core.JaxprEqn]] | None:
    """The sum of scalar operands with which an op begins: its variable, its summands, and the additions."""
    jaxpr = body.jaxpr
    often: dict[core.Var, int] = {}
    for atom in (*(a for e in jaxpr.eqns for a in e.invars), *jaxpr.outvars):
        if isinstance(atom, core.Var):
            often[atom] = often.get(atom, 0) + 1
    scalars = {v for v in jaxpr.invars if not shape(v) and often.get(v) == 1}
    sums: dict[core.Var, tuple[list[core.Var], list[core.JaxprEqn]]] = {v: ([v], []) for v in scalars}
    for eqn in jaxpr.eqns:
        operands = [a for a in eqn.invars if isinstance(a, core.Var)]
        zero = [a for a in eqn.invars if isinstance(a, core.Literal)]
        if (
            known(eqn.primitive).name != "add"
            or any(a not in sums or often[a] > 1 for a in operands)
            or any(a.val != 0 for a in zero)
        ):
            continue
        parts = [sums.pop(a) for a in operands]
        sums[eqn.outvars[0]] = [v for own, _ in parts for v in own], [*(e for _, own in parts for e in own), eqn]
    best = max(sums.items(), key=lambda pair: len(pair[1][0]), default=None)
    return None if best is None or len(best[1][0]) < 3 else (best[0], *best[1])


def _by_group(
    op: Op,
    total: core.Var,
    summands: Sequence[core.Var],
    additions: Sequence[core.JaxprEqn],
    home: Mapping[str, DeviceMesh],
    at: OnGroups,
) -> list[Op]:
    """``op`` behind one that adds up the summands of each group."""
    assert op.body is not None
    jaxpr, tensors = op.body.jaxpr, dict(zip(op.body.jaxpr.invars, op.inputs, strict=True))
    by_group: dict[DeviceMesh, list[PTensor]] = {}
    for v in summands:
        maker = at.graph.flow.maker(tensors[v])
        by_group.setdefault(home[maker.path if maker is not None else op.path], []).append(tensors[v])
    if len(by_group) == 1 or len(by_group) == len(summands):
        return [op]
    found, sums = list[Op](), list[PTensor]()
    for group, parts in by_group.items():
        made = PTensor(op.path + "@sum" + _on(group), parts[0].aval, parts[0].role)
        sums.append(made if len(parts) > 1 else parts[0])
        if len(parts) > 1:
            body = at.bodies.join(made.aval, len(parts))
            found.append(Op(made.name, op.kind, tuple(parts), (made,), body, call=op.call, loop=op.loop))
    rest = [e for e in jaxpr.eqns if e not in additions]
    kept = [v for v in jaxpr.invars if v not in summands]
    inner = make_jaxpr(rest, [total, *kept], jaxpr.outvars, jaxpr)

    def body_of(*xs: object) -> list[object]:
        whole = xs[0]
        for x in xs[1 : len(sums)]:
            whole = whole + x  # type: ignore[operator]
        return list(evaluate(inner, [whole, *xs[len(sums) :]]))

    inputs = (*sums, *(tensors[v] for v in kept))
    found.append(dataclasses.replace(op, inputs=inputs, body=at.bodies.traced(body_of, [t.aval for t in inputs])))
    return found
