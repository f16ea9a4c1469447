"""What does the search cost on many devices? Random pairs of layouts of a tensor, 1,024 long in every dim.

Rows of a mesh like 8x8x16 assign its three axes at random: to copies, to value shares, to dims, in any order. Rows
``R·V·D`` have source and target in canonical device order, drawn from all layouts of so many devices; their common mesh
has up to ten axes. Rows ``one pair`` search one and the same pair of layouts on three axes of growing sizes.

``seconds`` (of CPU) is the median over the pairs, each searched once; ``states`` the most that one search expanded, after
``MOST_STATES`` of which it hurries; ``floor_gap`` the worst ratio of a path's cost to what the search proved that no path
can cost less than (1: all are optimal). ``memory_bytes`` is the peak of what the search with the most states holds, by
``tracemalloc``; ``device_list_bytes`` the size of the device numbers, of which a search keeps a few copies.
"""

import dataclasses
import math
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from bench.harness import Row, main
from bench.redistribution import factorizations

COLUMNS = (
    "mesh", "devices", "dims", "cost", "pairs", "seconds", "seconds_max", "states", "floor_gap", "memory_bytes",
    "device_list_bytes",
)  # fmt: skip
SIZE = 1024  # of every dim, so that all devices may cut one
ITEMSIZE = 4
MESHES = ((2, 2, 2), (4, 4, 4), (8, 8, 16))
GROWING = ((2, 2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 16))
COSTS = ("bytes", "h100")
MOST_SECONDS = 0.05  # the median of a mesh's pairs
MOST_EXPANDED = 4000  # of any pair: the search hurries more and more


@dataclasses.dataclass(frozen=True)
class Case:
    """Pairs of layouts, drawn with a seed of their own.

    Attributes:
        kind: "mesh" draws uses of the axes, "counts" layouts R·V·D, "pair" is one and the same pair.
        sizes: of the mesh's axes; of counts the number of devices.
    """

    kind: str
    sizes: tuple[int, ...]
    dims: int
    pairs: int

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        return {"mesh": sizes, "counts": "R·V·D", "pair": f"one pair, {sizes}"}[self.kind]

    def drawn(self) -> list[tuple[Any, Any]]:
        rng = random.Random(f"{self}, {self.sizes}, {self.dims}")
        if self.kind == "pair":
            return [one_pair(self.sizes)]
        draw = by_axes if self.kind == "mesh" else by_counts
        return [(draw(rng, self.sizes, self.dims), draw(rng, self.sizes, self.dims)) for _ in range(self.pairs)]


def mesh_of(sizes: tuple[int, ...]) -> Any:
    from jscaler.materialize import DeviceMesh

    return DeviceMesh(tuple(range(math.prod(sizes))), tuple((f"x{i}", size) for i, size in enumerate(sizes)))


def by_axes(rng: random.Random, sizes: tuple[int, ...], dims: int) -> Any:
    """A random use for every axis."""
    from jscaler.materialize import Layout

    mesh = mesh_of(sizes)
    use = {name: rng.choice(["copies", "shares", *range(dims)]) for name in mesh.names}
    names = rng.sample(mesh.names, len(mesh.names))
    cuts = tuple(tuple(n for n in names if use[n] == dim) for dim in range(dims))
    return Layout(mesh, ((SIZE,),) * dims, cuts, tuple((n, "add") for n in mesh.names if use[n] == "shares"))


def by_counts(rng: random.Random, sizes: tuple[int, ...], dims: int) -> Any:
    """A random layout R·V·D of all that there are."""
    from jscaler.materialize import parse_layout

    replicas, shares, *parts = rng.choice(list(factorizations(math.prod(sizes), dims + 2)))
    return parse_layout(f"R{replicas} V{shares} D({','.join(map(str, parts))})", (SIZE,) * dims)


def one_pair(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Value shares, and two axes that go to other dims: the path takes several steps, whatever the sizes."""
    from jscaler.materialize import Layout

    mesh, subdims = mesh_of(sizes), ((SIZE,),) * 4
    source = Layout(mesh, subdims, (("x1",), (), ("x2",), ()), (("x0", "add"),))
    return source, Layout(mesh, subdims, ((), ("x2", "x0"), (), ("x1",)))


def cases(quick: bool) -> list[Case]:
    if quick:
        table = [Case("mesh", sizes, 4, 5) for sizes in (MESHES[0], MESHES[-1])]
        return [*table, Case("counts", (64,), 4, 5), *(Case("pair", sizes, 4, 1) for sizes in (GROWING[0], GROWING[-1]))]
    table = [Case("mesh", sizes, dims, 40) for sizes in MESHES for dims in (2, 3, 4)]
    table += [Case("counts", (devices,), dims, 20) for devices in (8, 64, 512, 1024) for dims in (2, 3, 4)]
    return [*table, *(Case("pair", sizes, 4, 1) for sizes in GROWING)]


def rows(quick: bool) -> Iterator[Row]:
    for case in cases(quick):
        for name in COSTS:
            yield measured(case, name, quick)


def measured(case: Case, name: str, quick: bool) -> Row:
    """All pairs of a case under one cost model."""
    pairs, cost = case.drawn(), cost_of(name)
    seconds, paths = zip(*(searched(source, target, cost) for source, target in pairs), strict=True)
    hardest = max(range(len(pairs)), key=lambda i: paths[i].explored)
    row: Row = {"mesh": str(case), "devices": math.prod(case.sizes), "dims": case.dims, "cost": name, "pairs": len(pairs)}
    row |= {"seconds": round(statistics.median(seconds), 4), "seconds_max": round(max(seconds), 4)}
    row["states"] = paths[hardest].explored
    row["floor_gap"] = round(max(path.cost / path.floor if path.floor else 1.0 for path in paths), 3)
    row["memory_bytes"] = held(*pairs[hardest], cost)
    row["device_list_bytes"] = list_bytes(pairs[hardest][0].mesh.devices)
    row["bounds"] = {"states": MOST_EXPANDED} | ({"seconds": MOST_SECONDS} if case.kind == "mesh" and not quick else {})
    return row


def cost_of(name: str) -> Any:
    from jscaler.clusters import BYTES, find_cluster

    return BYTES if name == "bytes" else find_cluster(name)


def searched(source: Any, target: Any, cost: Any) -> tuple[float, Any]:
    """CPU seconds of one search that nobody has made before, and the path."""
    from jscaler.materialize import cheapest_path

    cheapest_path.cache_clear()
    begin = time.process_time()
    path = cheapest_path(source, target, ITEMSIZE, cost)
    seconds = time.process_time() - begin
    assert path is not None, f"no path from {source} to {target}"
    return seconds, path


def held(source: Any, target: Any, cost: Any) -> int:
    """The most bytes that one search holds at once."""
    tracemalloc.start()
    try:
        searched(source, target, cost)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def list_bytes(devices: tuple[int, ...]) -> int:
    return sys.getsizeof(devices) + sum(map(sys.getsizeof, devices))


if __name__ == "__main__":
    main("search_scale", __doc__ or "", COLUMNS, rows)
