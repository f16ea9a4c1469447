"""Where state comes from and where it goes: through ops, and through the carries and stacks of loops."""

from collections.abc import Iterable, Iterator, Sequence, Set

from jax.extend import core

from jscaler.ir import Body, Graph, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.lax_primitives import known

Reads = list[frozenset[int]]  # by result, operands


class StateFlow:
    """The ways of state through a graph. State does not come by way of gradients: those end a way back."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict[tuple[Body, bool], Reads] = {}

    def all_of(self, tensor: PTensor) -> Set[PTensor]:
        """What ``tensor`` is made of."""
        return set(self._back(tensor, frozenset(), handed=False))

    def handed(self, tensor: PTensor, ends: Set[PTensor]) -> list[PTensor]:
        """Those of ``ends`` that ``tensor`` may be, cast, chosen among others, or stacked."""
        return [t for t in self._back(tensor, ends, handed=True) if t in ends]

    def onward(self, tensor: PTensor) -> tuple[Set[PTensor], list[Op]]:
        """All that is made of ``tensor``, itself among it, and the ops that read any of that; but for backward passes."""
        readers: dict[str, Op] = {}

        def beyond(at: PTensor) -> Iterator[PTensor]:
            yield from self.graph.flow.targets(at)
            for op in self.graph.consumers.get(at, ()):
                if op.kind != "backward":
                    readers[op.path] = op
                    yield from op.outputs

        return set(closure([tensor], beyond)), list(readers.values())

    def _back(self, tensor: PTensor, ends: Set[PTensor], handed: bool) -> Iterator[PTensor]:
        return closure([tensor], lambda at: self._sources(at, handed) if at not in ends else ())

    def _sources(self, tensor: PTensor, handed: bool) -> Sequence[PTensor]:
        op = self.graph.producer.get(tensor)
        if op is None:
            return self.graph.flow.sources(tensor)
        if op.kind == "backward" or op.body is None:
            return ()
        return [op.inputs[i] for i in sorted(self._reads(op.body, handed)[op.outputs.index(tensor)])]

    def _reads(self, body: Body, handed: bool) -> Reads:
        """By result the operands that it depends on, or those that it may be."""
        key = body, handed
        if key not in self.known:
            found: dict[core.Var, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(body.jaxpr.invars)}

            def of(atoms: Iterable[object]) -> frozenset[int]:
                return frozenset[int]().union(*(found.get(v, frozenset()) for v in atoms if isinstance(v, core.Var)))

            for eqn in body.jaxpr.eqns:
                one = known(eqn.primitive)
                data = one.data(len(eqn.invars)) if one.hands_on else ()
                operands = [eqn.invars[i] for i in data] if handed else eqn.invars
                found.update(dict.fromkeys(eqn.outvars, of(operands)))
            self.known[key] = [of([v]) for v in body.jaxpr.outvars]
        return self.known[key]
