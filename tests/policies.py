"""Random plans for random programs: splits in space and in time, nested in any order, on the devices in any order."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jscaler import Chunk, Replicate, Split, TimeSplit


def draw_policy(seed: int, num_devices: int, share: float = 0.7) -> Callable[[Any, np.ndarray], None]:
    """A policy that splits a ``share`` of the ops at random: nested, along several factors, in a random device order.

    All grids cut one array of devices along its axes, so that they lie on one mesh.
    """
    primes = _primes(num_devices)

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng(seed)
        base = rng.permutation(devices).reshape(primes)
        for op in graph.ops:
            if op.kind == "backward" and op.forward is None:
                continue
            chance = share if op.kind != "backward" else 0.1
            if rng.random() < chance:
                _split_at_random(graph, op, base, rng)

    policy.__name__ = f"random_{seed}"
    return policy


def draw_groups_policy(seed: int, num_devices: int, share: float = 0.8) -> Callable[[Any, np.ndarray], None]:
    """A policy that places most ops on one of two or three device groups, apart, nested or overlapping, split at random.

    The ops of a loop lie on one group.
    """

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng([seed, 2])
        counts = rng.integers(1, num_devices + 1, int(rng.integers(2, 4)))
        chosen = (rng.permutation(devices)[:count].reshape(_primes(int(count))) for count in counts)
        bases = list({frozenset(base.ravel().tolist()): base for base in chosen}.values())
        of_loop: dict[str, int] = {}
        for op in graph.ops:
            if op.kind == "backward" and (op.forward is None or op.loop or rng.random() > 0.1):
                continue
            number = int(rng.integers(len(bases)))
            if op.loop:
                number = of_loop.setdefault(op.loop, number)
            elif rng.random() > share:
                continue
            _split_at_random(graph, op, bases[number], rng)

    policy.__name__ = f"groups_{seed}"
    return policy


def draw_loops_policy(seed: int, num_devices: int) -> Callable[[Any, np.ndarray], None]:
    """A policy whose loop over a dim of the input spans two or three device groups of one size, apart or overlapping.

    Ops lie on the groups in their order (a pipeline), or on any of them; in every third plan parts take turns on the
    groups. What is open, in space and in time, is filled in.
    """

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng([seed, 3])
        count, size = int(rng.integers(2, 4)), int(rng.choice([n for n in (1, 2, 3) if n <= num_devices]))
        groups = [rng.permutation(devices)[:size] for _ in range(count)]
        parts = int(rng.choice([2, 4]))
        found = {op: name for op, name in _along_input(graph, rng).items() if _runs_in_turn(graph, op, name, parts)}
        in_order, in_turn = rng.random() < 0.7, rng.random() < 0.3
        for place, (op, name) in enumerate(found.items()):
            stage = place * count // len(found) if in_order else int(rng.integers(count))
            algorithms: list[Any] = [TimeSplit(name, parts, "t")]
            if size > 1:
                fits = graph.rule(op).factors[name].size // parts % size == 0 and rng.random() < 0.7
                algorithms.append(Split(name, size) if fits else Replicate(size))
            there = [groups[stage], groups[-1 - stage]] if in_turn else [groups[stage]]
            places = np.array([there[part % len(there)] for part in range(parts)])
            graph.op_assign(graph.op_trans(op, *algorithms), places if size > 1 else places.ravel())

    policy.__name__ = f"loops_{seed}"
    return policy


def draw_timed_policy(seed: int, num_devices: int, share: float = 0.7) -> Callable[[Any, np.ndarray], None]:
    """A policy with time axes: one or two, each along a dim of the input from op to op, or along whatever an op has.

    Most ops are split between devices as well, inside those axes.
    """
    primes = _primes(num_devices)

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng(seed)
        base = rng.permutation(devices).reshape(primes)
        in_time: dict[Any, dict[str, int]] = {}
        for axis in ("outer", "inner")[: 1 + (rng.random() < 0.3)]:
            found = _along_input(graph, rng) if rng.random() < 0.6 else _anywhere(graph, rng)
            parts = int(rng.choice([2, 2, 3, 4]))
            for op, name in found.items():
                own = in_time.setdefault(op, {})
                if _runs_in_turn(graph, op, name, parts * own.get(name, 1)):
                    graph.op_trans(op, TimeSplit(name, parts, axis))
                    own[name] = parts * own.get(name, 1)
        for op in graph.ops:
            if not (op.kind == "backward" and op.forward is None) and rng.random() < (
                share if op.kind != "backward" else 0.1
            ):
                _split_at_random(graph, op, base, rng, in_time.get(op))

    policy.__name__ = f"timed_{seed}"
    return policy


def draw_counts_policy(seed: int, num_devices: int, share: float = 0.5) -> Callable[[Any, np.ndarray], None]:
    """A policy whose time axes have few names and any counts, on forward and on backward ops, each along any factor.

    Half of them have no name: their cells share devices. What the names do not allow is refused, with a `PlanError`.
    """
    primes = _primes(num_devices)

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng([seed, 1])
        base = rng.permutation(devices).reshape(primes)
        named = rng.random() < 0.5
        counts = {axis: int(rng.choice([2, 3, 4])) for axis in ("outer", "inner")}
        for op in graph.ops:
            factors = [n for n, f in graph.rule(op).factors.items() if f.size > 1]
            if not factors or (op.kind == "backward" and op.forward is None) or rng.random() >= share:
                continue
            name, axis = factors[int(rng.integers(len(factors)))], ("outer", "inner")[int(rng.integers(2))]
            parts = counts[axis] if named and rng.random() < 0.97 else int(rng.choice([2, 3, 4]))
            if not _runs_in_turn(graph, op, name, parts):
                continue
            if named:
                graph.op_trans(op, TimeSplit(name, parts, axis))
                _split_at_random(graph, op, base, rng, {name: parts})
            else:
                _share_devices(graph, op, name, parts, base, rng)

    policy.__name__ = f"counts_{seed}"
    return policy


def _share_devices(graph: Any, op: Any, name: str, parts: int, base: np.ndarray, rng: np.random.Generator) -> None:
    """Cells along ``name`` on the same devices, which split another factor or copy."""
    others = [n for n, f in graph.rule(op).factors.items() if n != name and f.splittable and f.size % base.size == 0]
    space = Split(others[int(rng.integers(len(others)))], base.size) if others else Replicate(base.size)
    cells = graph.op_trans(op, space, Split(name, parts))
    graph.op_assign(cells, np.broadcast_to(base.reshape(-1, 1), (base.size, parts)))


def _along_input(graph: Any, rng: np.random.Generator) -> dict[Any, str]:
    """Some of the ops that a dim of the batch reaches, and their factors for it."""
    tensor = next(t for t in graph.inputs if t.name == "batch/x")
    dim = int(rng.integers(len(tensor.shape)))
    share = float(rng.choice([0.8, 1.0, 1.0]))
    found = {op: name for op, name in graph.factor_of(tensor.name, dim).items() if op.kind == "forward"}
    return {op: name for op, name in found.items() if rng.random() < share}


def _anywhere(graph: Any, rng: np.random.Generator) -> dict[Any, str]:
    """Any ops, each along any factor of its own."""
    found = {}
    for op in graph.ops:
        names = list(graph.rule(op).factors)
        if op.kind != "backward" and names and rng.random() < 0.5:
            found[op] = names[int(rng.integers(len(names)))]
    return found


def _runs_in_turn(graph: Any, op: Any, name: str, parts: int) -> bool:
    rule = graph.rule(op)
    factor = rule.factors[name]
    return not (
        op.anywhere or factor.kind == "blocked" or factor.size % parts or any(slid == name for slid, _, _ in rule.halos)
    )


def _split_at_random(
    graph: Any, op: Any, base: np.ndarray, rng: np.random.Generator, in_time: Mapping[str, int] | None = None
) -> None:
    """Deal the axes of ``base``, in a random order, to the op's factors; some copy, some cut into unequal parts.

    Args:
        in_time: factor -> its parts in time, if the op runs part by part.
    """
    factors = graph.rule(op).factors
    order = [int(i) for i in rng.permutation(base.ndim)]
    algorithms: list[Any] = []
    done: dict[str, int] = dict(in_time or {})
    uneven: set[str] = set()
    for axis in order:
        parts = base.shape[axis]
        fits = {n: f for n, f in factors.items() if f.splittable and n not in uneven}
        legal = [n for n, f in fits.items() if f.size // done.get(n, 1) % parts == 0]
        ragged = [n for n, f in fits.items() if not f.even_only and n not in done and f.size > parts]
        if ragged and rng.random() < 0.1:
            name = ragged[int(rng.integers(len(ragged)))]
            uneven.add(name)
            edges = sorted(int(i) + 1 for i in rng.choice(factors[name].size - 1, parts - 1, replace=False))
            sizes = np.diff([0, *edges, factors[name].size])
            algorithms.append(Split(name, sizes=tuple(map(int, sizes))))
        elif legal and rng.random() < 0.85:
            name = legal[int(rng.integers(len(legal)))]
            done[name] = done.get(name, 1) * parts
            algorithms.append(Split(name, parts))
        else:
            algorithms.append(Replicate(parts))
    whole = [n for n, f in factors.items() if f.kind != "blocked" and not f.even_only and n not in uneven]
    chunks = [n for n in whole if factors[n].size // done.get(n, 1) % 2 == 0]
    if chunks and not in_time and rng.random() < 0.05:
        algorithms.append(Chunk(chunks[int(rng.integers(len(chunks)))], 2))
    graph.op_assign(graph.op_trans(op, *algorithms), base.transpose(order))


def _primes(number: int) -> list[int]:
    smallest = next((p for p in range(2, number + 1) if number % p == 0), None)
    return [1] if smallest is None else [smallest, *(p for p in _primes(number // smallest) if p > 1)]
