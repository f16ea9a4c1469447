"""The best of all choices, one after another: slow, and plain to see that it is right."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jscaler.materialize import Layout
from jscaler.plan_search.program.choices import Choice
from jscaler.plan_search.program.program import Program


def best(
    program: Program, legal: Callable[[Mapping[str, Choice]], bool] = lambda choices: True
) -> tuple[float, dict[str, Choice]]:
    """The fewest seconds, and what takes them; of a graph without loops, whose ops are all different."""
    program.seconds.exact = True
    nodes = program.nodes.by_name
    found: tuple[float, dict[str, Choice]] = (math.inf, {})
    for taken in itertools.product(*(node.choices for node in nodes.values())):
        choices = dict(zip(nodes, taken, strict=True))
        if not legal(choices):
            continue
        seconds = sum(program.seconds.of(nodes[name], choice) for name, choice in choices.items())
        seconds += sum(_brought(program, *read) for read in _reads(program, choices))
        seconds += sum(_kept(program, leaf, choices) for leaf in program.leaves.by_name.values())
        found = min(found, (seconds, choices), key=lambda pair: pair[0])
    return found


def _reads(program: Program, choices: Mapping[str, Choice]) -> Iterator[tuple[Any, Layout, list[Layout]]]:
    """Each tensor that nodes make, how it is made, and in which layouts others want it."""
    nodes = program.nodes
    for op in nodes.graph.ops:
        for index, tensor in enumerate(op.outputs if op.path in nodes.of_op else ()):
            wants = [
                nodes.layout(reader, choices[nodes.of_op[reader.path].name], number)
                for reader in nodes.graph.ops
                for number, read in enumerate(reader.inputs)
                if read is tensor and tensor.shape and reader.path in nodes.of_op
            ]
            if wants:
                yield tensor, nodes.layout(op, choices[nodes.of_op[op.path].name], index, result=True), wants


def _brought(program: Program, tensor: Any, made: Layout, wants: list[Layout]) -> float:
    """Of bringing it in the cheapest way: some of the layouts are paid, and the others are cut out of those."""
    wants = [want for want in dict.fromkeys(wants) if want != made]

    def price(source: Layout, target: Layout) -> float:
        return program.seconds.moved(source, target, tensor.itemsize)

    least = math.inf
    for paid in itertools.product((False, True), repeat=len(wants)):
        own = [want for want, pays in zip(wants, paid, strict=True) if pays]
        if all(want in own or price(made, want) == 0 or any(price(x, want) == 0 for x in own) for want in wants):
            least = min(least, sum(price(made, want) for want in own))
    return least


def _kept(program: Program, leaf: Any, choices: Mapping[str, Choice]) -> float:
    """Of a parameter in the best of its modes."""
    leaves, nodes = program.leaves, program.nodes
    layout = leaf.main[0].layout(nodes, choices[leaf.node.name])
    made = leaf.maker and leaves.made(leaf, choices[nodes.of_op[leaf.maker.path].name])
    least = math.inf
    for state in leaves.states(leaf, layout, program.zeros(leaf.name)):
        fetched = (leaves.fetched(leaf, r, state, r.layout(nodes, choices[r.node.name])) for r in leaf.others)
        least = min(least, leaves.cost(leaf, state, made) + sum(fetched))
    return least
