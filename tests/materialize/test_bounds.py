"""How few bytes can do, against brute force over elements and over all ways to send messages."""

import itertools
import random
from collections.abc import Iterator

import pytest
from masks import elements
from materialize.holdings import bytes_sent
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import bytes_of, count_layouts

from jscaler.clusters import BYTES
from jscaler.materialize import Layout, cheapest_path, parse_layout
from jscaler.materialize.bounds import HeldPart, bytes_at_least, sends_to_join
from jscaler.materialize.transitions import regions_between


def missing(source: Layout, target: Layout) -> dict[int, int]:
    """For each device the number of elements that it wants and does not hold."""
    held = {d: set(elements(source.mask(p))) for p, d in enumerate(source.mesh.devices)}
    return {d: len(set(elements(target.mask(p))) - held[d]) for p, d in enumerate(target.mesh.devices)}


@pytest.mark.parametrize(
    ("mesh", "exact"),
    [
        (mesh_of(2, 2), True),
        (mesh_of(2, 2, 2), True),
        (mesh_of(4, 2), True),
        (mesh_of(3, 3), True),
        (mesh_of(2, 3), False),
        (mesh_of(6, 2), False),
        (mesh_of(4, 3), False),
    ],
    ids=lambda x: str(x.axes) if hasattr(x, "axes") else "",
)
def test_what_devices_hold_of_what_they_want(mesh, exact: bool) -> None:
    rng, equal = random.Random(0), 0
    size = len(mesh.devices)
    layouts = [layout for layout in every_layout(mesh, ((size,), (size, 2))) if not layout.values]
    for source, target in [rng.choices(layouts, k=2) for _ in range(150)]:
        wanted = sum(target.mask(p).size for p in range(size))
        true = 1 - sum(missing(source, target).values()) / wanted
        overlap = HeldPart(mesh, target.cuts)
        for _ in range(2):  # the second time from what it remembers
            found = overlap.fraction(source.cuts)
        if exact:
            assert found == pytest.approx(true), f"{source} -> {target}"
        else:
            assert found >= true - 1e-9, f"{source} -> {target}"
        equal += found == pytest.approx(true)
    assert equal >= (150 if exact else 75)


def test_a_cycle_of_equal_digits_comes_for_free() -> None:
    """Rows by x0 and columns by x1 against rows by x1 and columns by x0: equal on the diagonal, half of the devices."""
    assert HeldPart(mesh_of(2, 2), [("x1",), ("x0",)]).fraction([("x0",), ("x1",)]) == 1 / 2
    assert HeldPart(mesh_of(2, 2), [("x1",)]).fraction([("x0",)]) == 1 / 2
    assert HeldPart(mesh_of(2, 2), [("x0", "x1")]).fraction([("x0",)]) == 1
    assert HeldPart(mesh_of(2, 2), [("x0",)]).fraction([("x0", "x1")]) == 1 / 2


@pytest.mark.smoke
@pytest.mark.parametrize("num_devices", [4, 6])
def test_without_value_shares_it_is_what_devices_do_not_hold(num_devices: int) -> None:
    """Any device orders, refinements with and without common boundaries, sizes that the cuts do not divide."""
    rng = random.Random(num_devices)
    refinements = [((24,), (4,)), ((4, 6), (4,)), ((3, 8), (2, 2))]
    meshes = [mesh_of(2, num_devices // 2, devices=rng.sample(range(num_devices), num_devices)) for _ in range(3)]
    layouts = [layout for mesh in meshes for subdims in refinements for layout in every_layout(mesh, subdims)]
    layouts = without_values([*layouts, *uneven(num_devices, (24, 4))])
    for source, target in [rng.choices(layouts, k=2) for _ in range(200)]:
        needed = sum(missing(source, target).values()) * 4 / num_devices
        assert bytes_at_least(source, target, 4) == pytest.approx(needed), f"{source} -> {target}"


def uneven(num_devices: int, shape: tuple[int, ...]) -> list[Layout]:
    """Layouts of ``shape`` in canonical order, whatever divides."""
    even = tuple(s * num_devices for s in shape)
    return [parse_layout(str(layout), shape) for layout in count_layouts(num_devices, even)]


def without_values(layouts: list[Layout]) -> list[Layout]:
    return [layout for layout in layouts if not layout.values]


@pytest.mark.parametrize("num_devices", [3, 4, 6])
def test_so_it_is_for_uneven_sizes(num_devices: int) -> None:
    for source, target in itertools.product(without_values(uneven(num_devices, (5, 7))), repeat=2):
        needed = sum(missing(source, target).values()) * 4 / num_devices
        assert bytes_at_least(source, target, 4) == pytest.approx(needed), f"{source} -> {target}"


def test_nothing_to_bring_and_scalars() -> None:
    whole, part = parse_layout("R4 V1 D(1)", (8,)), parse_layout("R1 V1 D(4)", (8,))
    assert bytes_at_least(whole, part, 4) == 0
    assert bytes_at_least(part, whole, 4) == 6 * 4
    copies, sums = parse_layout("R2 V1 D()", ()), parse_layout("R1 V2 D()", ())
    assert bytes_at_least(copies, copies, 4) == 0
    assert bytes_at_least(sums, copies, 4) == 4  # each device hears of the other's
    assert bytes_at_least(copies, sums, 4) == 0


@pytest.mark.parametrize(("num_devices", "shape"), [(4, (4, 8)), (6, (6, 4))], ids=str)
def test_no_path_sends_less_than_the_least_bytes(num_devices: int, shape: tuple[int, ...]) -> None:
    tight = 0
    layouts = [*count_layouts(num_devices, shape), *count_layouts(num_devices, shape, rng=random.Random(0))]
    for source, target in itertools.product(layouts, repeat=2):
        path = cheapest_path(source, target, 4, BYTES)
        least = bytes_at_least(source, target, 4)
        assert least <= bytes_of(path, 4) + 1e-6, f"{source} -> {target} by {path.steps}"
        tight += least == pytest.approx(bytes_of(path, 4))
    assert tight > len(layouts) ** 2 / 4


@pytest.mark.parametrize("num_devices", [3, 4, 6])
def test_no_exchange_sends_less_than_the_least_bytes(num_devices: int) -> None:
    layouts = [*uneven(num_devices, (5,)), *count_layouts(num_devices, (12,), rng=random.Random(0))]
    for source, target in itertools.product(layouts, repeat=2):
        if source.shape == target.shape:
            sent = bytes_sent(regions_between(source, target), 4)
            assert bytes_at_least(source, target, 4) <= sent + 1e-6, f"{source} -> {target}"


# Gossip: every way to send messages, one after the other


Known = tuple[frozenset[int], ...]  # per device the sums that it knows, as bit sets of the summands


@pytest.mark.parametrize(
    ("devices", "shares", "copies", "left"),
    [
        (2, 2, 1, 1),
        (2, 2, 2, 1),
        (3, 3, 1, 1),
        (3, 3, 3, 1),
        (4, 2, 4, 1),
        (4, 4, 1, 1),
        (4, 4, 2, 1),
        (4, 4, 2, 2),
        (4, 4, 4, 2),
    ],
)
def test_messages_to_join_shares(devices: int, shares: int, copies: int, left: int) -> None:
    start: Known = tuple(frozenset([1 << device * shares // devices]) for device in range(devices))
    reached, rounds = {canonical(start)}, 0
    while not any(joined(known, shares, copies, left) for known in reached):
        reached = {canonical(after) for known in reached for after in sent(known)}
        rounds += 1
    assert rounds == sends_to_join(shares, copies, left)


def canonical(known: Known) -> Known:
    return tuple(sorted(known, key=sorted))


def sums(known: frozenset[int]) -> set[int]:
    """What a device can add up from what it knows: sums in which no summand counts twice."""
    found = {0}
    for some in known:
        found |= {other | some for other in found if not other & some}
    return found - {0}


def sent(known: Known) -> Iterator[Known]:
    for a, b in itertools.permutations(range(len(known)), 2):
        for message in sums(known[a]) - known[b]:
            yield tuple(k | {message} if i == b else k for i, k in enumerate(known))


def joined(known: Known, shares: int, copies: int, left: int) -> bool:
    """Whether so many devices know one of ``left`` (1 or 2) sums that add up to all, each sum as often."""
    everything, able = (1 << shares) - 1, [sums(k) for k in known]
    if left == 1:
        return sum(everything in some for some in able) >= copies
    for half in range(1, everything):
        one, other = ({i for i, some in enumerate(able) if part in some} for part in (half, everything ^ half))
        if min(len(one), len(other)) >= copies // 2 and len(one | other) >= copies:
            return True
    return False


def test_fewer_shares_need_no_messages() -> None:
    assert sends_to_join(2, 4, 2) == sends_to_join(1, 4, 2) == 0
