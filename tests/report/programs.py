"""Small programs of one or two collectives each, and what their HLO must say on any platform and version.

Run as a script, where the extra ``aot`` is installed, it writes what ``tests/report/hlo`` stores.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.report.hlo import collectives

ROWS = (64, 16)  # of float32, on each of 8 devices
X = 64 * 16 * 4  # their bytes
EVENS_AND_ODDS = [[6, 0, 2, 4], [7, 5, 3, 1]]
ALL = (tuple(range(8)),)
RING = tuple((i, (i + 1) % 8) for i in range(8))
BACK = tuple((target, source) for source, target in RING)


Launch = tuple[str, float, tuple[tuple[int, ...], ...]]


def launches(text: str) -> list[Launch]:
    """What a module launches, as ``Program.launches`` has it."""
    return sorted((c.kind, c.sent, c.pairs or c.groups) for c in collectives(text))


@dataclass(frozen=True)
class Program:
    """Code for one device of eight, and the collectives that it launches: kind, bytes sent, groups or pairs."""

    run: Callable[..., Any]
    kinds: tuple[str, ...]
    sent: tuple[float, ...]
    members: tuple[tuple[tuple[int, ...], ...], ...]
    axes: tuple[tuple[str, int], ...] = (("x", 8),)

    @property
    def launches(self) -> list[Launch]:
        """One per collective, in an order that does not depend on XLA's."""
        return sorted(zip(self.kinds, self.sent, self.members, strict=True))

    def compiled(self, devices: Sequence[Any], options: dict[str, str] | None = None) -> Any:
        """The program over the first eight devices; each holds ``ROWS`` of one array of eight times as many."""
        names, sizes = zip(*self.axes, strict=True)
        mesh = Mesh(np.array(devices[:8]).reshape(sizes), names)
        split = NamedSharding(mesh, P(names))
        local = jax.shard_map(self.run, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
        array = jax.ShapeDtypeStruct((8 * ROWS[0], *ROWS[1:]), "float32", sharding=split)
        return jax.jit(local).lower(array).compile(compiler_options=options)


def _ordered(run: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return lambda a: run(a, "x", axis_index_groups=EVENS_AND_ODDS, **how)


TWO_BY_TWO = (("a", 2), ("b", 2), ("c", 2))
GROUPS = tuple(map(tuple, EVENS_AND_ODDS))
C_MAJOR = ((0, 4, 1, 5), (2, 6, 3, 7))
PROGRAMS = {
    "psum": Program(lambda a: lax.psum(a, "x"), ("all-reduce",), (2 * 7 * X / 8,), (ALL,)),
    "all_gather": Program(lambda a: lax.all_gather(a, "x", tiled=True), ("all-gather",), (7 * X,), (ALL,)),
    "psum_scatter": Program(lambda a: lax.psum_scatter(a, "x", tiled=True), ("reduce-scatter",), (7 * X / 8,), (ALL,)),
    "all_to_all": Program(lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), ("all-to-all",), (7 * X / 8,), (ALL,)),
    "ppermute": Program(lambda a: lax.ppermute(a, "x", RING), ("collective-permute",), (X,), (RING,)),
    "ppermute of a few": Program(  # three of eight devices take part, one of them keeps what it has
        lambda a: lax.ppermute(a, "x", [(0, 4), (1, 5), (2, 2)]), ("collective-permute",), (2 * X / 8,),
        (((0, 4), (1, 5), (2, 2)),),
    ),
    "psum, ordered": Program(_ordered(lax.psum), ("all-reduce",), (2 * 3 * X / 4,), (GROUPS,)),
    "all_gather, ordered": Program(_ordered(lax.all_gather, tiled=True), ("all-gather",), (3 * X,), (GROUPS,)),
    "psum over c and a": Program(
        lambda a: lax.psum(a, ("c", "a")), ("all-reduce",), (2 * 3 * X / 4,), (C_MAJOR,), TWO_BY_TWO,
    ),
    "all_gather over c and a": Program(
        lambda a: lax.all_gather(a, ("c", "a"), tiled=True), ("all-gather",), (3 * X,), (C_MAJOR,), TWO_BY_TWO,
    ),
    "all_gather over b": Program(
        lambda a: lax.all_gather(a, "b", tiled=True), ("all-gather",), (X,),
        (((0, 2), (1, 3), (4, 6), (5, 7)),), TWO_BY_TWO,
    ),
    "scatter, then gather": Program(
        lambda a: lax.all_gather(lax.psum_scatter(a, "x", tiled=True), "x", tiled=True),
        ("reduce-scatter", "all-gather"), (7 * X / 8, 7 * X / 8), (ALL, ALL),
    ),
    # what follows is asynchronous on a GPU: there is something to do meanwhile
    "psum, then a part of it": Program(
        lambda a: lax.dynamic_slice_in_dim(lax.psum(a, "x"), lax.axis_index("x") * 8, 8), ("all-reduce",),
        (2 * 7 * X / 8,), (ALL,),
    ),
    "all_gather, then a part of it": Program(
        lambda a: lax.dynamic_slice_in_dim(lax.all_gather(a, "x", tiled=True), lax.axis_index("x") * 64, 64),
        ("all-gather",), (7 * X,), (ALL,),
    ),
    "two all_to_alls": Program(
        lambda a: [lax.all_to_all(b, "x", 0, 0, tiled=True) for b in (a, a[:8] * 2)], ("all-to-all",) * 2,
        (7 * X / 8, 7 * X / 64), (ALL, ALL),
    ),
    "ppermute both ways": Program(
        lambda a: (lax.ppermute(a, "x", RING), lax.ppermute(a[:8] * 2, "x", BACK)), ("collective-permute",) * 2,
        (X, X / 8), (RING, BACK),
    ),
}  # fmt: skip


def _twice(collective: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    return lambda a: (collective(a), collective(a[:8] * 2))


TWO_BY_FOUR = (("a", 2), ("b", 4))
# XLA merges these on a GPU; here as they are written
MERGED = {
    "two psums": Program(
        _twice(lambda a: lax.psum(a, "x")),
        ("all-reduce",) * 2,
        (2 * 7 * X / 8, 2 * 7 * X / 64),
        (ALL, ALL),
    ),
    "two gathers": Program(
        _twice(lambda a: lax.all_gather(a, "x", tiled=True)),
        ("all-gather",) * 2,
        (7 * X, 7 * X / 8),
        (ALL, ALL),
    ),
    "two scatters": Program(
        _twice(lambda a: lax.psum_scatter(a, "x", tiled=True)),
        ("reduce-scatter",) * 2,
        (7 * X / 8, 7 * X / 64),
        (ALL, ALL),
    ),
    "two permutes": Program(
        _twice(lambda a: lax.ppermute(a, "x", RING)),
        ("collective-permute",) * 2,
        (X, X / 8),
        (RING, RING),
    ),
}
FOLDED = {
    "psum over b, then a": Program(
        lambda a: lax.psum(lax.psum(a, "b"), "a"), ("all-reduce",) * 2, (2 * 3 * X / 4, X),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))), TWO_BY_FOUR,
    ),
    "sum of psums": Program(
        lambda a: lax.psum(a, "x") + lax.psum(a * a, "x"), ("all-reduce",) * 2, (2 * 7 * X / 8,) * 2, (ALL, ALL),
    ),
}  # fmt: skip


def stored(devices: Sequence[Any]) -> str:
    """The collectives in the text of every program, to keep beside the tests."""
    return "".join(f"// {name}\n{snippet(p.compiled(devices).as_text())}\n" for name, p in (PROGRAMS | MERGED).items())


def snippet(text: str) -> str:
    """The first line and the collectives of a module, without XLA's notes to itself."""
    header, *lines = text.splitlines()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = [line.strip() for line in lines if re.search(rf" (?:{kinds})(?:-start|-done)?\(", line)]
    short = re.sub(r", .*(, num_partitions=\d+).*", r"\1", header)
    return "\n".join([short, *(re.sub(r", (?:metadata|backend_config)=\{.*", "", line) for line in found)])


if __name__ == "__main__":
    from jscaler.report.targets import described_devices

    print(stored(described_devices("8xH100-80GB")), end="")
