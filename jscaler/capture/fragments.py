"""Group flat equations into fragments: the ops of the graph.

Neighbouring equations of one scope that share data are one fragment. A contraction ends it (else a tensor that is read
twice puts one factor on two dims), and so does a reduction to a scalar (what follows would meet a partial sum). What
turns a square, and what reads it as it lies, are two, as with contractions: ``z + z.T``. Behind a gradient, where updates
stand, a contraction is a fragment of its own.
Equations that depend on no input (iota, masks) are copied into every fragment that reads them.

Fragments never form a cycle, by levels: a fragment's level is above those of all it reads, and an equation joins a
fragment only if everything else it reads lies on lower levels.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jax.extend import core

from jscaler.capture.batch_rows import BatchRows, Need, largest
from jscaler.capture.jaxprs import Atom, shape
from jscaler.capture.trace import TaggedEquation, Trace, TracedCall
from jscaler.ir.walk import closure, grouped, in_order
from jscaler.lax_primitives import known
from jscaler.lax_primitives.primitive import Role

TRANSFORMED = re.compile(r"\b(?:vmap|jvp|transpose|checkpoint|remat|jit)\(([^()]*)\)")


@dataclass(eq=False)
class Fragment:
    """A growing group of equations of one scope; ``era`` counts the gradient calls that have begun before it, and
    ``squares`` are what it transposes, which then have dims where others of their sizes were."""

    call: int | None
    scope: str
    level: float
    scalar: bool
    era: int = 0
    eqns: list[tuple[int, core.JaxprEqn]] = field(default_factory=list)
    closed: bool = False
    squares: set[core.Var] = field(default_factory=set)
    need: Need = "none"
    learned: bool = False

    @property
    def is_preparation(self) -> bool:
        """Whether it is no more than a cast, a mask or a reshape of what reads it, or a term of an update (``b1 * mu``)."""
        is_update = self.call is None and self.era > 0
        return (bool(self.scope) or is_update) and all(_role(e) in ("", "moves") for _, e in self.eqns)

    def takes(self, preparation: "Fragment") -> bool:
        """Whether ``preparation``, which only this fragment reads, may become part of it."""
        alone = any(_role(e) == "alone" for _, e in self.eqns)
        turned = any(not preparation.squares.isdisjoint(_variables(e)) for _, e in self.eqns)
        # what prepares a call (parameters cast for it) is no part of the update that reads the same parameters
        beside = (self.call, self.scope) == (preparation.call, preparation.scope)
        beside = beside and (self.call is not None or self.era == preparation.era)
        return beside and not (alone or turned)


def fragments(
    step: Trace,
    generated: Mapping[core.Var, core.JaxprEqn] | None = None,
    ends: Set[core.Var] = frozenset(),
    rows: BatchRows | None = None,
    outermost: Set[str] = frozenset(),
) -> tuple[list[Fragment], dict[core.Var, core.JaxprEqn]]:
    """The fragments of ``step`` in an order that respects their dependencies, and the equations to be copied.

    What reads a gradient comes after the whole forward program of its call, since autodiff comes between the two.
    ``generated`` are input-free equations of the program around a body; what makes one of ``ends`` ends its fragment.
    ``rows`` are those of the batch in what ``step`` is given, ``outermost`` the scopes of the whole model.
    """
    builder = _Builder(step, ends, rows or BatchRows(), outermost)
    builder.generated.update(generated or {})
    for index, tagged in enumerate(step.equations):
        builder.add(index, tagged)
    builder.merge_preparations((*step.outvars, *ends))
    return _topological(builder.fragments, builder.home, step.calls), builder.generated


def scope_of(eqn: core.JaxprEqn) -> str:
    """The Flax module path of an equation.

    ``jnp.einsum`` adds a scope of its own, which is dropped, and so are transformations: of ``vmap(head/dot)`` the inside.
    """
    stack = str(eqn.source_info.name_stack)
    while "(" in stack and (inside := TRANSFORMED.sub(r"\1", stack)) != stack:
        stack = inside
    parts = stack.split("/")
    return "/".join(p for p in parts if p and "->" not in p)


def _role(eqn: core.JaxprEqn) -> Role:
    return known(eqn.primitive).role


def _draws(eqn: core.JaxprEqn) -> bool:
    """Whether it draws random bits: no operand has their dims."""
    return eqn.primitive.name == "random_bits"


def _variables(eqn: core.JaxprEqn) -> list[core.Var]:
    return [v for v in eqn.invars if isinstance(v, core.Var)]


def _squares(eqn: core.JaxprEqn) -> list[core.Var]:
    """What an equation transposes without another shape."""
    turns = eqn.primitive.name == "transpose" and shape(eqn.invars[0]) == shape(eqn.outvars[0])
    return _variables(eqn) if turns else []


class _Builder:
    def __init__(self, step: Trace, ends: Set[core.Var], rows: BatchRows, outermost: Set[str]):
        self.ends, self.rows = ends, rows
        self.eqns = [tagged.eqn for tagged in step.equations]
        self.results = {v for v in step.outvars if isinstance(v, core.Var)}
        self.outermost = {"", *outermost}
        self.fragments: list[Fragment] = []
        self.home: dict[core.Var, Fragment] = {}
        self.readers: dict[core.Var, list[Fragment]] = {}
        self.generated: dict[core.Var, core.JaxprEqn] = {}
        self.gradient_call = {g: i for i, call in enumerate(step.calls) for g in call.gradients}
        self.calls = step.calls
        self.call_level: dict[int, float] = {}
        self.gradient_level: dict[int, float] = {}
        self.begun: set[int] = set()
        self.wrt = {v for call in step.calls for v in call.wrt}

    def add(self, index: int, tagged: TaggedEquation) -> None:
        eqn, call = tagged.eqn, tagged.call
        self.begun |= {call} if call is not None else set()
        reads = [v for v in eqn.invars if isinstance(v, core.Var) and v not in self.generated]
        if not reads and not eqn.effects and _role(eqn) != "alone" and not self.wrt & set(eqn.outvars):
            self.generated.update(dict.fromkeys(eqn.outvars, eqn))
            return
        need = self.rows.add(eqn)
        fragment = self._choose(index, eqn, call, reads, need)
        fragment.eqns.append((index, eqn))
        fragment.need = largest([fragment.need, need])
        fragment.learned |= self.rows.is_learned(eqn)
        fragment.squares.update(_squares(eqn))
        for var in eqn.outvars:
            self.home[var] = fragment
        for var in reads:
            if shape(var) and fragment not in self.readers.setdefault(var, []):
                self.readers[var].append(fragment)
        full_reduction = _role(eqn) == "reduces" and not shape(eqn.outvars[0])
        ends = _role(eqn) in ("contracts", "alone") or full_reduction
        apart = (need == "mixed" or self._looks_up(eqn)) and self._is_outermost(fragment)
        fragment.closed = ends or apart or not self.ends.isdisjoint(eqn.outvars)
        if call is not None:
            self.call_level[call] = max(self.call_level.get(call, 0), fragment.level)

    def _looks_up(self, eqn: core.JaxprEqn) -> bool:
        """Whether it takes rows of a parameter, as the data says: a table of words, that whatever follows does not read."""
        table = eqn.invars[0] if eqn.primitive.name == "gather" else None
        return table in self.rows.learned and not self.rows.rows(table) and bool(self.rows.rows(eqn.outvars[0]))

    def _choose(self, index: int, eqn: core.JaxprEqn, call: int | None, reads: list[core.Var], need: Need) -> Fragment:
        scope = scope_of(eqn)
        scalar = not any(shape(v) for v in (*eqn.outvars, *reads))
        sources = [self.home[v] for v in reads if v in self.home]
        beside = [f for v in reads if shape(v) for f in self.readers.get(v, ()) if self._may_stand_beside(f, need)]
        sources = [f for f in sources if self._may_follow(f, index, need)]
        below = max((self._level(v) for v in reads), default=0)
        squares = set(_squares(eqn))
        for candidate in (*sources, *beside):
            joins = (candidate.call, candidate.scope, candidate.scalar, candidate.closed) == (call, scope, scalar, False)
            # what prepares a call (parameters cast for it) is no part of the update that reads the same parameters
            joins = joins and (call is not None or candidate.era == len(self.begun))
            # nor is an evaluation behind the update, which contracts what the update has made: state lies otherwise
            joins = joins and not (call is None and self.begun and _role(eqn) == "contracts")
            joins = joins and candidate.squares.isdisjoint(reads)
            joins = joins and not (squares and any(squares.intersection(_variables(e)) for _, e in candidate.eqns))
            if not joins or _role(eqn) == "alone":
                continue
            others = max((self._level(v) for v in reads if self.home.get(v) is not candidate), default=0)
            if others < candidate.level:
                return candidate
        # What only prepares an input (a reshape of a bias) lies below all else, so that its reader need not.
        inputs_only = not sources and below == 0 and _role(eqn) == "moves"
        fragment = Fragment(call, scope, 0.5 if inputs_only else int(below) + 1, scalar, len(self.begun))
        self.fragments.append(fragment)
        return fragment

    def _may_follow(self, fragment: Fragment, index: int, need: Need) -> bool:
        """Whether equation ``index`` may join a fragment that it reads.

        In the loss, and in the model's own scope, what sees all rows may, and what depends on parameters may join what does
        not, if whoever else reads the fragment waits for it, too. Else a mask of the data would wait for a layer, or for
        the batch's end. What is drawn beside something else has rows of its own. In a module a reduction is one op with
        what it reduces (a norm), which `per_microbatch` names.
        """
        if not self._is_outermost(fragment):
            return True
        if need == "mixed" or (_draws(self.eqns[index]) and any(_draws(e) for _, e in fragment.eqns)):
            return False
        learned = self.rows.is_learned(self.eqns[index]) and not fragment.learned and fragment.need != "none"
        if need != "joined" and not learned:
            return True
        made = {v for _, e in fragment.eqns for v in e.outvars}
        inside = {n for n, _ in fragment.eqns} | {index}
        others = {n for v in made for n in self.uses.get(v, ())} - inside
        return made.isdisjoint(self.results) and (not others or others <= self._behind(index))

    def _may_stand_beside(self, fragment: Fragment, need: Need) -> bool:
        """Whether what needs so much of the batch may join a fragment that reads what it reads."""
        sees_all = {"joined", "mixed"}.intersection((fragment.need, need))
        return fragment.need == need or (bool(sees_all) and not self._is_outermost(fragment))

    def _is_outermost(self, fragment: Fragment) -> bool:
        """Whether it is of the loss, or of the model's own scope, and of no module in that."""
        return fragment.scope in self.outermost

    @functools.cached_property
    def uses(self) -> dict[core.Var, list[int]]:
        """Variable -> the equations that read it."""
        return grouped((v, n) for n, eqn in enumerate(self.eqns) for v in _variables(eqn))

    def _behind(self, index: int) -> set[int]:
        """The equations that need what equation ``index`` makes."""
        return set(closure([index], lambda n: [m for v in self.eqns[n].outvars for m in self.uses.get(v, ())]))

    def _level(self, var: core.Var) -> float:
        if var in self.home:
            return self.home[var].level
        return self._gradient_level(self.gradient_call[var]) if var in self.gradient_call else 0

    def _gradient_level(self, index: int) -> float:
        """A gradient comes after all that its call reads and computes, which is all there when one is first read."""
        if index not in self.gradient_level:
            call = self.calls[index]
            before = (self._level(v) for v in (call.loss, *call.wrt) if isinstance(v, core.Var))
            self.gradient_level[index] = max(self.call_level.get(index, 0), *before, 0)
        return self.gradient_level[index]

    def merge_preparations(self, outvars: Iterable[Atom]) -> None:
        """Casts, reshapes and masks with one reader, in their own scope, become part of it. Cannot close a cycle."""
        results = {v for v in outvars if isinstance(v, core.Var)}
        # what an equation without results reads (a debug print) stays a tensor of its own
        mute = (e for f in self.fragments for _, e in f.eqns if not e.outvars)
        results |= {v for e in mute for v in e.invars if isinstance(v, core.Var)}
        uses: dict[core.Var, list[core.Var]] = {}
        for fragment in self.fragments:
            for _, eqn in fragment.eqns:
                for var in eqn.invars:
                    if isinstance(var, core.Var):
                        uses.setdefault(var, []).extend(eqn.outvars[:1])
        kept = []
        for fragment in self.fragments:
            produced = {v for _, e in fragment.eqns for v in e.outvars}
            readers = {self.home[out] for v in produced for out in uses.get(v, ())} - {fragment}
            reader = readers.pop() if len(readers) == 1 and not produced & results else None
            if reader is None or not fragment.is_preparation or not reader.takes(fragment):
                kept.append(fragment)
                continue
            reader.eqns = sorted(fragment.eqns + reader.eqns, key=lambda pair: pair[0])
            reader.squares |= fragment.squares
            self.home.update(dict.fromkeys(produced, reader))
        self.fragments = kept


def _topological(found: list[Fragment], home: dict[core.Var, Fragment], calls: Sequence[TracedCall]) -> list[Fragment]:
    """Dependencies first, otherwise in program order (by last equation)."""
    number = {id(f): i for i, f in enumerate(found)}
    gradient_call = {v: index for index, call in enumerate(calls) for v in call.gradients}
    # what must be there before a call is differentiated: its forward fragments, its loss, what it differentiates
    members = [{number[id(home[v])] for v in (c.loss, *c.wrt) if isinstance(v, core.Var) and v in home} for c in calls]
    for i, fragment in enumerate(found):
        if fragment.call is not None and calls:  # (the body of a construct belongs to a call, and holds none)
            members[fragment.call].add(i)
    # a call stands between its members and the readers of its gradients: number len(found) + its index
    before = {len(found) + call: own for call, own in enumerate(members)}
    for i, fragment in enumerate(found):
        reads = {v for _, e in fragment.eqns for v in e.invars if isinstance(v, core.Var)}
        sources = {number[id(home[v])] for v in reads if v in home} - {i}
        sources |= {len(found) + gradient_call[v] for v in reads if v in gradient_call}
        before[i] = sources
    order = in_order(before, key=lambda i: found[i].eqns[-1][0] if i < len(found) else -1)
    return [found[i] for i in order if i < len(found)]
