"""Where the rows of a step that follows another's state are cut: where that state lies, so that none of it is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.ir import PTensor
from jscaler.ir.loop import reads_of
from jscaler.plans.balance import Unit, cuts_and_places
from jscaler.plans.layers import of_parameters
from jscaler.primitives import Planner


@dataclass(frozen=True)
class CutsAsStored:
    """Cuts rows as `balanced` does, but where state lies on the groups of the stages in order.

    Attributes:
        groups: the devices of each stage.
    """

    groups: Sequence[frozenset[int]]

    def __call__(self, graph: Planner, units: Sequence[Unit], stages: int, *more: object) -> list[int]:
        cuts, places = cuts_and_places(graph, units, stages, *more)  # type: ignore[arg-type]
        lies, found, last = _lies(graph), list[int](), 0
        for number, unit in enumerate(units):
            here = {lies[t][min(unit.iteration, len(lies[t]) - 1)] for t in reads_of(unit.item) if t in lies}
            own, following = self.groups[len(found)], self.groups[len(found) + 1 : len(found) + 2]
            if here.isdisjoint([own]) and not here.isdisjoint(following):
                found.append(([number] + [place for place in places if last < place <= number])[-1])
            last = number if here else last
        return found if len(found) == stages - 1 == len(set(found)) else cuts


def _lies(graph: Planner) -> dict[PTensor, list[frozenset[int]]]:
    """The devices of leaves, and of what is made of them alone; of stacks whose ranges lie apart, those of each layer."""
    found = {tensor: [graph.stored[tensor.name]] for tensor in graph.inputs if tensor.name in graph.stored}
    made = of_parameters(graph)
    for op in graph.ops:
        sources = [tensor for tensor in op.inputs if tensor in found]
        if sources and made.issuperset(op.outputs):
            layers = [one for tensor in sources for one in found[tensor] * tensor.shape[0]] if op.ranges == "joined" else []
            found.update(dict.fromkeys(op.outputs, layers or found[sources[0]]))
    return found
