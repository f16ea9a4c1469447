"""Does redistribution deliver, and at which price? Every ordered pair of layouts of a tensor on one device group: each
device's part is compared with numpy's; bytes with what the devices need and do not hold, and with GSPMD's compiled HLO
for the same resharding.

``right`` and ``wrong`` count pairs by their numbers on every device, ``refused`` those without an adapter. ``full_copy``
counts paths through a full copy that send more than is needed. ``bytes_vs_lower`` is the mean bytes of all pairs by
their mean lower bound: what devices need and do not hold; where value shares are joined, the sends that joining takes,
2(n-1)/n for copies and (n-1)/n for parts. ``bytes_vs_gspmd`` compares the collectives in the two compiled programs, pair
by pair; GSPMD knows no value shares and no order of its own, so those rows have none. ``not_as_named`` counts programs
whose HLO holds other collectives than the path names.

``--target 8xH100-80GB`` compiles for GPUs that need not be there, and runs nothing: no column of numbers, and both
programs' bytes are those of XLA:GPU's collectives. It needs the extra ``aot``.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.harness import Row, main

COLUMNS = (
    "case", "pairs", "right", "wrong", "refused", "full_copy", "bytes_vs_lower", "bytes_vs_gspmd_mean",
    "bytes_vs_gspmd_max", "compiled", "not_as_named",
)  # fmt: skip
SIZES = {2: 8, 4: 8, 6: 12, 8: 16, 12: 24, 16: 32}  # of every dim, so that all devices may cut one
COMPILED = 40  # programs per row whose HLO is read, where GSPMD has none to compare with
AT_ONCE = 40  # adapters per compiled program


@dataclasses.dataclass(frozen=True)
class Case:
    """Pairs of layouts on ``devices`` devices; ``order`` seeds the devices' order, 0 is the canonical one."""

    devices: int
    dims: int
    order: int = 0
    sample: int | None = None
    shapes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes or (SIZES[self.devices],) * self.dims

    def __str__(self) -> str:
        order = f", random order {self.order}" if self.order else ""
        sample = f", {self.sample} random pairs" if self.sample else ""
        sizes = f" of {'×'.join(map(str, self.shapes))}" if self.shapes else ""
        return f"{self.devices} devices {self.dims}-D{sizes}{order}{sample}"

    def pairs(self) -> list[tuple[Any, Any]]:
        """All ordered pairs of different layouts R·V·D; source and target each in its own order."""
        from jscaler.materialize import parse_layout

        counts = list(factorizations(self.devices, self.dims + 2))
        chosen = list(itertools.permutations(counts, 2))
        if self.sample is not None:
            chosen = random.Random(self.order).sample(chosen, self.sample)
        rng = random.Random(self.order)
        orders = [rng.sample(range(self.devices), self.devices) if self.order else range(self.devices) for _ in "ab"]
        on = [f" on [{' '.join(map(str, order))}]" for order in orders]

        def layout(parts: tuple[int, ...], side: int) -> Any:
            return parse_layout(f"R{parts[0]} V{parts[1]} D({','.join(map(str, parts[2:]))}){on[side]}", self.shape)

        return [(layout(a, 0), layout(b, 1)) for a, b in chosen]


def factorizations(number: int, slots: int) -> Iterator[tuple[int, ...]]:
    """All ordered tuples of ``slots`` factors whose product is ``number``."""
    if slots == 0:
        if number == 1:
            yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorizations(number // first, slots - 1):
                yield (first, *rest)


def cases(quick: bool, exhaustive: bool) -> list[Case]:
    if quick:
        return [Case(2, 2), Case(4, 2), Case(8, 2, 0, 30), Case(6, 2, 1, 20)]
    table = [Case(n, d) for n in (2, 4, 6, 8) for d in (2, 3)] + [Case(16, 2)]
    table += [Case(8, 1), Case(4, 4, 0, 100)]
    table += [Case(4, 2, shapes=(7, 10)), Case(6, 2, shapes=(10, 9)), Case(3, 3, shapes=(7, 4, 5)), Case(12, 2, 0, 200)]
    if not exhaustive:
        return [case if case.devices < 8 else dataclasses.replace(case, sample=100) for case in table]
    ordered = [dataclasses.replace(case, order=order) for case in table for order in (1, 2)]
    return [*table, *ordered, Case(16, 3, 0, 500)]


def described_cases(quick: bool, exhaustive: bool, devices: int) -> list[Case]:
    """The cases for a described cluster of ``devices``."""
    if devices != 8:
        raise SystemExit(f"the cases are of 8 devices, the cluster has {devices}; give one like 8xH100-80GB")
    if exhaustive:
        return [Case(8, dims, order) for dims in (2, 3) for order in (0, 1, 2)]
    return [Case(8, 2, 0, 30)] if quick else [Case(8, 2)]


def rows(quick: bool, exhaustive: bool = False, target: str | None = None) -> Iterator[Row]:
    import jax

    from jscaler.report.targets import described_devices

    devices = described_devices(target) if target else jax.devices()
    total: Counter[str] = Counter()
    for case in described_cases(quick, exhaustive, len(devices)) if target else cases(quick, exhaustive):
        for row in case_rows(case, devices, runs=target is None):
            total.update({key: row[key] for key in ("pairs", "right", "compiled", *BOUNDS) if key in row})
            yield row
    yield {"case": "all", **total, "bounds": {key: BOUNDS[key] for key in BOUNDS if key in total}}


BOUNDS: dict[str, float] = {"wrong": 0, "refused": 0, "full_copy": 0, "not_as_named": 0}


def case_rows(case: Case, devices: Sequence[Any], runs: bool) -> Iterator[Row]:
    """One row for pairs without value shares, one for those with; ``devices`` may be described ones that run nothing."""
    from jscaler.lower.named import named_collectives

    pairs = case.pairs()
    found = [adapter_or_none(source, target) for source, target in pairs]
    refused = [i for i, adapter in enumerate(found) if adapter is None]
    right = dict(delivered([(i, a) for i, a in enumerate(found) if a is not None], case.shape)) if runs else {}
    plain = [i for i, (a, b) in enumerate(pairs) if not a.values and not b.values]
    shared = sorted(set(range(len(pairs))) - set(plain))
    for name, chosen in ((str(case), plain), (f"{case}, value shares", shared)):
        if not chosen:
            continue
        some = [a for a in (found[i] for i in chosen) if a is not None]
        row: Row = {"case": name, "pairs": len(chosen), "refused": len(set(refused) & set(chosen))}
        if runs:
            row["right"] = sum(right.get(i, False) for i in chosen)
            row["wrong"] = len(some) - row["right"]
        row["full_copy"] = sum(detours(a) for a in some)
        bounded = [(a.bytes(4), lower_bound(a)) for a in some if not a.target.values]
        row["bytes_vs_lower"] = ratio(sum(b for b, _ in bounded), sum(b for _, b in bounded))
        against = chosen is plain and case.order == 0 and case.shapes is None
        compiled = some if against or not runs else random.Random(0).sample(some, min(len(some), COMPILED))
        ours = [hlo_bytes(program(a, devices)) for a in compiled]
        row["compiled"] = len(compiled)
        row["not_as_named"] = sum(named_collectives(a) != kinds for a, (kinds, _) in zip(compiled, ours, strict=True))
        row["bounds"] = {key: limit for key, limit in BOUNDS.items() if key in row}
        if against:
            row["bounds"]["bytes_vs_lower"] = 1.10
            row |= against_gspmd(some, [sent for _, sent in ours], devices)
            row["bounds"]["bytes_vs_gspmd_max"] = 1.0
        yield row


def adapter_or_none(source: Any, target: Any) -> Any:
    """The adapter, or None where there is none to be had."""
    from jscaler.errors import JscalerError
    from jscaler.materialize import find_adapter

    try:
        return find_adapter(source, target, 4)
    except JscalerError:
        return None


def delivered(adapters: Sequence[tuple[int, Any]], shape: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
    """Number of each pair, and whether its adapter delivers."""
    yield from zip([i for i, _ in adapters], numerically_right([a for _, a in adapters], shape), strict=True)


def ratio(a: float, b: float) -> float:
    return round(a / b, 4) if b else 1.0 if not a else math.inf


def against_gspmd(adapters: Sequence[Any], ours: Sequence[float], devices: Sequence[Any]) -> Row:
    theirs = [hlo_bytes(gspmd(a.source, a.target, devices))[1] for a in adapters]
    worst = max(ratio(a, b) for a, b in zip(ours, theirs, strict=True))
    whole = sum(math.prod(a.source.shape) * 4 for a in adapters)
    found = {"bytes_vs_gspmd_mean": ratio(sum(ours), sum(theirs)), "bytes_vs_gspmd_max": worst}
    return {**found, "ours_of_tensor": sum(ours) / whole, "gspmd_of_tensor": sum(theirs) / whole}


def detours(adapter: Any) -> bool:
    """Whether a path sends more than is needed, by way of a full copy that neither side is."""
    from jscaler.materialize.canonical import orderless

    between = [layout for stage in adapter.stages for layout in stage.layouts[1:-1]]
    ends = orderless(adapter.source) or orderless(adapter.target)
    return not ends and any(map(orderless, between)) and adapter.bytes(4) > lower_bound(adapter) * (1 + 1e-9)


def lower_bound(adapter: Any) -> float:
    """Mean bytes that each device must send: blocks it needs and does not hold, or shares that must be joined."""
    from jscaler.materialize.bounds import bytes_at_least

    return bytes_at_least(adapter.source, adapter.target, 4)


# Running and compiling


@functools.cache
def device_mesh(devices: tuple[Any, ...]) -> Any:
    from jax.sharding import Mesh

    return Mesh(np.array(devices), ("x",))


def local_programs(adapters: Sequence[Any], physical: Any) -> Any:
    """One function of the stacked parts of several tensors, to be jitted over the mesh ``physical``."""
    import jax
    from jax.sharding import PartitionSpec as P

    from jscaler.lower.emit_collectives import exchange
    from jscaler.materialize import DeviceMesh

    count = len(adapters[0].source.mesh.devices)
    over = DeviceMesh(tuple(range(count)), (("x", count),))

    def local(parts: list[Any]) -> list[Any]:
        return [exchange(adapter, part[0], over)[None] for adapter, part in zip(adapters, parts, strict=True)]

    spec = P("x")
    return jax.jit(jax.shard_map(local, mesh=physical, in_specs=spec, out_specs=spec, check_vma=False))


def numerically_right(adapters: Sequence[Any], shape: tuple[int, ...]) -> list[bool]:
    """Run every adapter on virtual devices; whether each device ends with what numpy says."""
    found: list[bool] = []
    rng = np.random.default_rng(0)
    for start in range(0, len(adapters), AT_ONCE):
        found += _run(adapters[start : start + AT_ONCE], shape, rng)
    return found


def _run(adapters: Sequence[Any], shape: tuple[int, ...], rng: np.random.Generator) -> list[bool]:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from bench.numeric import check_parts, deal
    from jscaler.errors import VerificationError

    count = len(adapters[0].source.mesh.devices)
    wholes = [rng.integers(0, 9, shape).astype(np.float32) for _ in adapters]
    physical = device_mesh(tuple(jax.devices()[:count]))
    sharding = NamedSharding(physical, P("x"))
    stacked = []
    for adapter, whole in zip(adapters, wholes, strict=True):
        parts = deal(adapter.source, whole, rng)
        stacked.append(jax.device_put(np.stack([parts[p] for p in adapter.source.mesh.positions]), sharding))
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    outs = local_programs(adapters, physical).lower(stacked).compile(compiler_options=fast)(stacked)
    found = []
    for adapter, whole, out in zip(adapters, wholes, outs, strict=True):
        parts = np.asarray(out)
        try:
            check_parts(adapter.target, [parts[d] for d in adapter.target.mesh.devices], whole)
            found.append(True)
        except VerificationError:
            found.append(False)
    return found


def program(adapter: Any, devices: Sequence[Any]) -> str:
    """The compiled HLO of one adapter on the first of ``devices``."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jscaler.report.hlo import AS_WRITTEN

    count = len(adapter.source.mesh.devices)
    physical = device_mesh(tuple(devices[:count]))
    sharding = NamedSharding(physical, P("x"))
    part = jax.ShapeDtypeStruct((count, *adapter.source.local_shape), np.float32, sharding=sharding)
    return local_programs([adapter], physical).lower([part]).compile(compiler_options=AS_WRITTEN).as_text()


def gspmd(source: Any, target: Any, devices: Sequence[Any]) -> str:
    """The compiled HLO of the same resharding by ``jax.jit`` with shardings."""
    import jax

    struct = jax.ShapeDtypeStruct(source.shape, np.float32, sharding=named_sharding(source, devices))
    identity = jax.jit(lambda x: x, out_shardings=named_sharding(target, devices))
    return identity.lower(struct).compile().as_text() or ""


def named_sharding(layout: Any, devices: Sequence[Any]) -> Any:
    from jax.sharding import Mesh, NamedSharding

    array = np.array([devices[d] for d in layout.mesh.devices]).reshape([s for _, s in layout.mesh.axes])
    return NamedSharding(Mesh(array, layout.mesh.names), layout.partition_spec())


def hlo_bytes(text: str) -> tuple[Counter[str], float]:
    """The collectives of a compiled program: how many of each kind, and the bytes that a device sends."""
    from jscaler.report.hlo import collectives

    found = collectives(text)
    return Counter(c.kind for c in found), sum(c.sent for c in found)


if __name__ == "__main__":
    options = {
        "exhaustive": {"action": "store_true", "help": "every case; may take an hour"},
        "target": {"metavar": "CLUSTER", "help": "compile for a described cluster like 8xH100-80GB, run nothing"},
    }
    main("redistribution", __doc__ or "", COLUMNS, rows, devices=16, options=options)
