"""Does a tensor get from one device group to another, and at which price? Pairs of layouts on two groups, run on virtual
devices and compared with numpy on every device.

``right`` and ``wrong`` count pairs by their numbers, ``refused`` those without a crossing. ``bytes_vs_lower`` is what goes
between devices of one group alone and of the other alone, by what the consumers need and none of them holds: the mean over
pairs, and ``bytes_vs_lower_max`` the worst. Value shares need one value of each element: the bound is the same with them.
Where groups overlap, devices of both may be a bridge inside of which nothing is slow, so ratios below 1 are possible.

``seconds_vs_p2p``, on v100-nvlink-ib100 with the groups on different hosts: a float32 tensor of 64 MiB from {R, V, D} to
{R, D} on fewer, as many and more devices, priced by one cost model against messages from device to device that spread over
all who hold a part; ``seconds_vs_one_holder`` against messages from the first holder alone.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.harness import Row, main
from bench.redistribution import factorizations

COLUMNS = (
    "case", "pairs", "right", "wrong", "refused", "bytes_vs_lower", "bytes_vs_lower_max", "seconds_vs_p2p",
    "seconds_vs_one_holder",
)  # fmt: skip
BOUNDS = {"wrong": 0, "refused": 0, "bytes_vs_lower": 1.05, "bytes_vs_lower_max": 1.25}
SEED = 15


@dataclasses.dataclass(frozen=True)
class Case:
    """Pairs of layouts on two groups of ``sizes`` devices.

    Attributes:
        shared: devices that are in both groups; None for a random number of them in each pair.
        order: seeds the devices' orders; 0 is that of their numbers.
        sample: pairs at random; None for all.
    """

    sizes: tuple[int, int]
    dims: int = 2
    shared: int | None = 0
    order: int = 0
    sample: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.lcm(*self.sizes), 10, 7)[: self.dims] if self.order else (2 * math.lcm(*self.sizes),) * self.dims

    def __str__(self) -> str:
        words = [f"{self.sizes[0]} → {self.sizes[1]}, {self.dims}-D"]
        words += ["overlapping"] if self.shared is None else []
        words += [f"random order {self.order}, sizes that do not divide"] if self.order else []
        return ", ".join(words)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        from jscaler.materialize import parse_layout

        rng = random.Random(SEED + self.order)
        counts = [list(factorizations(n, self.dims + 2)) for n in self.sizes]
        chosen = list(itertools.product(*counts))
        for first, second in rng.sample(chosen, self.sample) if self.sample and self.sample < len(chosen) else chosen:
            shared = rng.randint(1, min(self.sizes)) if self.shared is None else self.shared
            start = self.sizes[0] - shared
            groups = [list(range(self.sizes[0])), list(range(start, start + self.sizes[1]))]
            for group in groups if self.order or self.shared is None else []:
                rng.shuffle(group)
            yield tuple(  # type: ignore[misc]
                parse_layout(f"R{r} V{v} D({','.join(map(str, d))}) on [{' '.join(map(str, group))}]", self.shape)
                for (r, v, *d), group in zip((first, second), groups, strict=True)
            )


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case((4, 2), sample=8), Case((2, 3), sample=8), Case((4, 4), shared=None, sample=8)]
    sizes = [(4, 4), (4, 2), (2, 4), (4, 8), (8, 4), (6, 4), (4, 6), (2, 3), (3, 2), (1, 4), (4, 1)]
    more = [Case((8, 8), 3, sample=300), Case((16, 16), 3, sample=300)]
    overlapping = [Case(s, shared=None, sample=50) for s in ((4, 4), (6, 4), (4, 8), (8, 8))]
    ordered = [Case(s, order=o, sample=40) for s in ((4, 4), (6, 4), (3, 8)) for o in (1, 2)]
    return [*(Case(s) for s in sizes), *more, *overlapping, *ordered]


def rows(quick: bool, only: str = "") -> Iterator[Row]:
    for case in cases(quick):
        if only in str(case):
            yield case_row(case)
    if only in "seconds":
        yield from seconds_rows()


def case_row(case: Case) -> Row:
    """Run every pair."""
    from jscaler.errors import JscalerError
    from jscaler.materialize.crossing import find_crossing

    right, refused, ratios = 0, 0, list[float]()
    pairs = list(case.pairs())
    for number, (source, target) in enumerate(pairs):
        try:
            crossing = find_crossing(source, target, 4)
        except JscalerError:
            refused += 1
            continue
        right += delivers(crossing, number)
        sent, least = between(crossing), needed(source, target)
        ratios.append(sent / least if least else 1.0 if not sent else math.inf)
    found = {"bytes_vs_lower": round(float(np.mean(ratios)), 4), "bytes_vs_lower_max": round(max(ratios), 4)}
    wrong = len(pairs) - refused - right
    return {
        "case": str(case),
        "pairs": len(pairs),
        "right": right,
        "wrong": wrong,
        "refused": refused,
        **found,
        "bounds": BOUNDS,
    }


def delivers(crossing: Any, seed: int) -> bool:
    """Run it; whether each device of the target holds what its mask says."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from bench.numeric import check_parts, deal
    from jscaler.errors import VerificationError
    from jscaler.lower.emit import stacked
    from jscaler.runtime.crossings import CrossingRun

    rng = np.random.default_rng(seed)
    whole = rng.integers(-99, 99, crossing.source.shape).astype(np.int32)
    parts = np.stack(deal(crossing.source, whole, rng)).astype(np.int32)
    devices = jax.devices()
    here = [devices[d] for d in crossing.source.mesh.devices]
    rows = [jax.device_put(part, d) for part, d in zip(parts, here, strict=True)]
    sharding = NamedSharding(Mesh(np.array(here), ("x",)), P("x"))
    given = jax.make_array_from_single_device_arrays(stacked(len(parts), parts.shape[1:]), sharding, rows)
    came = np.asarray(CrossingRun(crossing, np.int32, devices, {})(given))
    came = came.reshape(len(crossing.target.mesh.devices), *crossing.target.local_shape)
    try:
        check_parts(crossing.target, list(came), whole)
    except VerificationError:
        return False
    return True


def between(crossing: Any) -> int:
    """Elements that go from devices of the producers' group alone to devices of the consumers' alone."""
    consumers, producers = set(crossing.target.mesh.devices), set(crossing.source.mesh.devices)
    devices = crossing.devices
    slow = [(a, b) for move in crossing.moves for a, b in move.pairs for _ in range(move.size)]
    return sum(devices[a] not in consumers and devices[b] not in producers for a, b in slow)


def needed(source: Any, target: Any) -> int:
    """Elements that no device of the target's group holds; a value share is not the value."""
    held = np.zeros(source.shape, bool)
    for position, device in enumerate(source.mesh.devices):
        if device in target.mesh.devices and not source.values:
            mask = source.mask(position)
            view = held.reshape([size for dim in mask.subdims for size in dim])
            view[tuple(slice(*interval) for dim in mask.box for interval in dim)] = True
    return int((~held).sum())


def seconds_rows() -> Iterator[Row]:
    """Eighteen named cases, groups on different hosts of eight V100."""
    from jscaler.clusters import find_cluster
    from jscaler.materialize import parse_layout
    from jscaler.materialize.crossing import find_crossing, hop_price

    cluster = find_cluster("v100-nvlink-ib100")
    shape, first = (4096, 4096), 4
    for number, name in ((2, "fewer"), (4, "as many"), (8, "more")):
        for before, after in itertools.product("RVD", "RD"):
            source, target = (
                parse_layout(f"{_counts(kind, n)} on [{start}-{start + n - 1}]", shape)
                for kind, n, start in ((before, first, 0), (after, number, 8))
            )
            ours = find_crossing(source, target, 4, cluster).cost  # type: ignore[arg-type]
            spread = hop_price(source, target, 4, cluster)  # type: ignore[arg-type]
            yield {
                "case": f"{before} on {first} → {after} on {number} ({name})",
                "pairs": 1,
                "seconds_vs_p2p": round(ours / spread, 4),
                "seconds_vs_one_holder": round(ours / one_holder(source, target, cluster), 4),
                "bounds": {"seconds_vs_p2p": 1.0},
            }


def _counts(kind: str, number: int) -> str:
    return {"R": f"R{number} V1 D(1,1)", "V": f"R1 V{number} D(1,1)", "D": f"R1 V1 D({number},1)"}[kind]


def one_holder(source: Any, target: Any, cluster: Any) -> float:
    """Seconds of messages from device to device where of those that hold the same only the first sends."""
    from jscaler.materialize.point_to_point import Holding, plan_regions

    firsts = {mask: place for place, mask in reversed([(p, source.mask(p)) for p in range(len(source.mesh.devices))])}
    held = [Holding(place, mask) for mask, place in firsts.items()]
    numbers = np.array([*source.mesh.devices, *target.mesh.devices])
    wanted = [Holding(len(source.mesh.devices) + i, target.mask(i)) for i in range(len(target.mesh.devices))]
    rounds = plan_regions(source.shape, held, [wanted], len(numbers)).rounds
    return sum(cluster.messages(numbers[np.array(r.pairs)], r.size * 4, len(numbers)) for r in rounds)


OPTIONS = {"only": {"default": "", "metavar": "TEXT", "help": "only cases whose name holds this; 'seconds' for those"}}

if __name__ == "__main__":
    main("crossings", __doc__ or "", COLUMNS, rows, devices=32, options=OPTIONS)
