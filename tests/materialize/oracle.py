"""The slow, obvious search: the whole graph of layouts, relaxed until nothing falls; and what layouts mean.

The graph has every state of the source's mesh and every state of the target's, every collective and local step between
them, and at most one permute, between any two states of equal parts and equal nested shares. No estimate, no pruning.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
from masks import elements
from materialize.layouts import every_layout

from jscaler.clusters import BYTES, CLUSTERS, CostModel
from jscaler.clusters.cost_model import FEW_STEPS
from jscaler.clusters.transition_kinds import COLLECTIVES
from jscaler.ir.mask import SubDims
from jscaler.materialize import DeviceMesh, Layout, Path, Transition, parse_layout
from jscaler.materialize.transitions import State, moves, steps_from

SMALL, LARGE = 4, 2**18  # bytes per element: latency decides, bandwidth decides
H100 = dataclasses.replace(CLUSTERS["h100"], devices_per_host=2)  # so that few devices cross hosts
V100 = dataclasses.replace(CLUSTERS["v100-nvlink-ib100"], devices_per_host=2)
V100_BY_4 = dataclasses.replace(V100, devices_per_host=4)
MODELS = [(BYTES, SMALL), (FEW_STEPS, SMALL), (H100, SMALL), (V100, LARGE)]
Pair = tuple[Layout, Layout]


class Oracle:
    """Least costs between all states of a source's and a target's mesh (or of one) for one tensor.

    Attributes:
        before, after: the states of the two meshes, as layouts.
        least: (before, after) least costs.
        rest: (after, after) least costs of what follows a permute.
    """

    def __init__(self, source: Layout, target: Layout, itemsize: int, cost: CostModel, combiners: Sequence[str] = ("add",)):
        key = (source.subdims, itemsize, cost, tuple(combiners))
        self.before, unmoved = _relaxed(source.mesh, *key)
        self.after, self.rest = _relaxed(target.mesh, *key)
        self.least = min_plus(unmoved, min_plus(_permutes(source.mesh, target.mesh, *key), self.rest))
        if source.mesh == target.mesh:
            self.least = np.minimum(self.least, unmoved)

    @staticmethod
    @functools.cache
    def of(source: DeviceMesh, target: DeviceMesh, subdims: SubDims, *key) -> "Oracle":
        """The oracle of two meshes; computed once."""
        bare = ((),) * sum(map(len, subdims))
        return Oracle(Layout(source, subdims, bare), Layout(target, subdims, bare), *key)


def least_cost(
    source: Layout, target: Layout, itemsize: int, cost: CostModel, combiners: Sequence[str] = ("add",)
) -> float:
    """The cost of the cheapest path from ``source`` to ``target`` through the meshes that they lie on."""
    oracle = Oracle.of(source.mesh, target.mesh, source.subdims, itemsize, cost, tuple(combiners))
    return float(oracle.least[oracle.before.index(source), oracle.after.index(target)])


def price(step: Transition, before: Layout, itemsize: int, cost: CostModel) -> float:
    """What one step costs, from its bytes and the cost model alone."""
    if step.kind == "permute":
        local = math.prod(before.local_sizes) * itemsize
        return cost.messages(moves(before, step.to), local, len(before.mesh.devices))
    if not COLLECTIVES[step.kind].sent(2):
        return cost.local_step
    return cost.collective(step.kind, before.mesh.groups(step.axes)).at(step.bytes(before, itemsize))


def bytes_of(path: Path, itemsize: int) -> float:
    """Bytes that each device sends on the way, in the mean."""
    return sum(step.bytes(here, itemsize) for here, step in zip(path.layouts, path.steps, strict=False))


def transitions_from(layout: Layout) -> Iterator[Transition]:
    """Every collective and local step that ``layout`` allows."""
    return steps_from(layout.mesh, layout.sizes, State(layout.cuts, layout.values))


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of matrices in which + is min and × is +."""
    return np.stack([(row[:, None] + b).min(0) for row in a])


@functools.cache
def _relaxed(
    mesh: DeviceMesh, subdims: SubDims, itemsize: int, cost: CostModel, combiners: tuple[str, ...]
) -> tuple[list[Layout], np.ndarray]:
    """All layouts of a mesh, and the least costs between them by collectives and local steps."""
    layouts = list(every_layout(mesh, subdims, combiners))
    place = {layout: i for i, layout in enumerate(layouts)}
    least = np.where(np.eye(len(layouts), dtype=bool), 0.0, math.inf)
    for i, here in enumerate(layouts):
        for step in transitions_from(here):
            if step.kind != "value_mask" or step.combiner in combiners:
                j = place[step.apply(here)]
                least[i, j] = min(least[i, j], price(step, here, itemsize, cost))
    while True:
        shorter = np.minimum(least, min_plus(least, least))
        if (shorter == least).all():
            return layouts, least
        least = shorter


@functools.cache
def _permutes(
    first: DeviceMesh, last: DeviceMesh, subdims: SubDims, itemsize: int, cost: CostModel, combiners: tuple[str, ...]
) -> np.ndarray:
    """The cost of one permute from any state of one mesh to any of the other."""
    before, after = (list(every_layout(mesh, subdims, combiners)) for mesh in (first, last))
    found = np.full((len(before), len(after)), math.inf)
    for (i, here), (j, there) in itertools.product(enumerate(before), enumerate(after)):
        if here.local_sizes == there.local_sizes and here.shares == there.shares:
            found[i, j] = price(Transition("permute", to=there), here, itemsize, cost)
    return found


# Layouts


def every_count(num_devices: int, sizes: Sequence[int], combiners: Sequence[str] = ("add",)) -> Iterator[str]:
    """All counts R · V · D of ``num_devices`` devices, without their order; cuts divide their sizes."""
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for r, v, *cuts in itertools.product(divisors, repeat=2 + len(sizes)):
        if r * v * math.prod(cuts) == num_devices and all(s % d == 0 for s, d in zip(sizes, cuts, strict=True)):
            for combiner in combiners if v > 1 else ("add",):
                yield f"R{r} V{v}{'' if combiner == 'add' else combiner} D({','.join(map(str, cuts))})"


def count_layouts(
    num_devices: int, sizes: Sequence[int], combiners: Sequence[str] = ("add",), rng: random.Random | None = None
) -> list[Layout]:
    """A layout for each count, in canonical device order or in random ones."""
    order = list(range(num_devices))
    found = []
    for counts in every_count(num_devices, sizes, combiners):
        if rng is not None:
            rng.shuffle(order)
        found.append(parse_layout(f"{counts} on [{' '.join(map(str, order))}]", sizes))
    return found


@functools.cache
def meaning(layout: Layout) -> tuple:
    """What a layout says, whatever its mesh: for each device the elements and the share that it holds.

    Shares are numbered by the first device that holds them: which summand is which does not matter.
    """
    number: dict[tuple, int] = {}
    said = []
    for device, position in sorted((d, p) for p, d in enumerate(layout.mesh.devices)):
        mask = layout.mask(position)
        said.append((device, frozenset(elements(mask)), number.setdefault(mask.shares, len(number))))
    return tuple(said), layout.shares, layout.memory
