"""Random problems for the tests of the schedule search."""

import random

from jscaler.tables import BlockKind
from jscaler.tables.search import Problem, StageCosts, chain_problem

KINDS: list[tuple[BlockKind, ...]] = [("F", "B"), ("F", "I", "W"), ("F", "R", "B")]


def random_chain(draw: random.Random, stages: int, devices: int, microbatches: int, hop: float = 0.0) -> Problem:
    """A chain whose stages have whole seconds and bytes, lie anywhere, and have some limits of memory."""
    kinds = draw.choice(KINDS)
    costs = []
    for _ in range(stages):
        seconds: dict[BlockKind, float] = {kind: draw.randint(1, 4) for kind in kinds}
        held: dict[BlockKind, float] = {"F": draw.randint(1, 3)}
        freed: dict[BlockKind, float] = {kinds[-1]: held["F"]}
        if kinds[-1] == "W" and draw.random() < 0.5:
            freed = {"I": 1, "W": held["F"] - 1}
        if "R" in kinds:
            held["R"] = draw.randint(0, 2)
            freed["B"] += held["R"]
        costs.append(StageCosts(seconds, held, freed))
    lies = [stage % devices for stage in range(stages)]
    draw.shuffle(lies)
    memory = [draw.choice([None, draw.randint(1, 9)]) for _ in range(1 + max(lies))]
    return chain_problem(costs, lies, microbatches, hop=hop, memory=memory, name="random")
