"""Domains of a policy's arguments: which values a search may give to a number."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jscaler.errors import PlanError, check_count, divisors, shown
from jscaler.plans.batch import BATCH


@dataclass(frozen=True)
class Setting:
    """What a space is laid over.

    Attributes:
        devices: how many the policy gets.
        per_host: how many of a host are among them, at most.
        batch: rows of the batch, or of a micro-batch where their number is chosen; 0 where nothing says what the batch is.
        layers: how many a stage has.
        numbers: the arguments of the policy that are chosen already.
        rows_of: path or pattern of the batch among the step's inputs, which policies get as ``batch``.
    """

    devices: int
    per_host: int
    batch: int
    layers: int = 1
    numbers: Mapping[str, Any] = field(default_factory=dict)
    rows_of: str = BATCH


class Value(NamedTuple):
    """One value of a domain.

    Attributes:
        chain: the text of its chain, whose values stand from the fastest to the slowest; those of several have no order.
        rank: its place in the chain.
        saves: whether what stands behind it in the chain holds less memory.
        parts: into how many micro-batches it cuts the batch.
    """

    value: Any
    chain: str = ""
    rank: int = 0
    saves: bool = False
    parts: int = 1


@dataclass(frozen=True)
class Domain:
    """The values that an argument may take, in chains from the fastest to the slowest.

    A chain promises that no value behind another computes or sends less. A search that has met the first one knows a
    bound of all. Its values may hold less memory (``saves``).

    Attributes:
        text: how it was written.
        chains: a function of the `Setting` that gives the chains.
        limit: the same without its ``most``, where it has one: what could be gained by more.
        cuts_batch: whether its values are numbers of micro-batches.
    """

    text: str
    chains: Any
    saves: bool = False
    limit: "Domain | None" = None
    cuts_batch: bool = False

    def values(self, at: Setting) -> list[Value]:
        """All of them, in order."""
        chains = self.chains(at)
        values = ((chain, *ranked) for chain in chains for ranked in enumerate(chain))
        return [Value(v, repr(chain), rank, self.saves, v if self.cuts_batch else 1) for chain, rank, v in values]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class OneOf(Domain):
    """One of several; see `one_of`."""

    options: tuple[Any, ...] = ()


def one_of(*options: Any) -> OneOf:
    """One of these, in no order: a domain; or a hole, of what a primitive takes in its place.

    Raises:
        PlanError: there is none.

    Example:
        >>> [value.value for value in one_of(1, 4).values(Setting(8, 8, 32))]
        [1, 4]
        >>> print(one_of(None, "zero1"))
        one_of(None, 'zero1')
    """
    if not options:
        raise PlanError("one_of takes the options, one or more; none was given")
    text = f"one_of({', '.join(map(repr, options))})"
    return OneOf(text, lambda at: [[value] for value in options], options=options)


def meshes(axes: int = 2) -> Domain:
    """Shapes of a mesh of all devices with at most so many axes, in no order; what shares a layer is within a host.

    Example:
        >>> [value.value for value in meshes().values(Setting(8, 4, 32))]
        [(8,), (4, 2), (2, 4)]
    """
    check_count("meshes: axes", axes)

    def shapes(devices: int, left: int, per_host: int) -> Iterator[tuple[int, ...]]:
        yield (devices,)
        for last in (n for n in divisors(devices) if 1 < n < devices and n <= per_host and left > 1):
            yield from ((*first, last) for first in shapes(devices // last, left - 1, per_host))

    return Domain(f"meshes({axes})", lambda at: [[shape] for shape in shapes(at.devices, axes, at.per_host)])


def in_order(*values: Any, saves: bool = True) -> Domain:
    """These values, of which none computes or sends less than those in front of it.

    Args:
        saves: whether each holds less memory than those in front of it.

    Example:
        >>> str(in_order(1, 2, 3))
        'in_order(1, 2, 3)'
    """
    if not values:
        raise PlanError("in_order: no values are given; a domain has one at least")
    return Domain(f"in_order({', '.join(map(repr, values))})", lambda at: [values], saves)


def divisors_of_devices(most: int | None = None, least: int = 1) -> Domain:
    """The divisors of the number of devices, in no order.

    Args:
        most, least: the greatest and the smallest.

    Example:
        >>> [value.value for value in divisors_of_devices(most=4).values(Setting(12, 8, 32))]
        [1, 2, 3, 4]
    """
    check_count("divisors_of_devices: least", least)
    if most is not None:
        check_count("divisors_of_devices: most", most, least=least)
    text = ", ".join([f"most={most}"] * (most is not None) + [f"least={least}"] * (least > 1))
    limit = divisors_of_devices(None, least) if most is not None else None

    def chains(at: Setting) -> list[list[int]]:
        return [[n] for n in divisors(at.devices) if least <= n and (most is None or n <= most)]

    return Domain(f"divisors_of_devices({text})", chains, limit=limit)


def within_host(least: int = 1) -> Domain:
    """The divisors of the number of devices that a host has room for, in no order.

    Example:
        >>> [value.value for value in within_host().values(Setting(32, 8, 32))]
        [1, 2, 4, 8]
    """
    check_count("within_host: least", least)

    def chains(at: Setting) -> list[list[int]]:
        return [[n] for n in divisors(at.devices) if least <= n <= at.per_host]

    limit = divisors_of_devices(None, least)
    return Domain(f"within_host({f'least={least}' if least > 1 else ''})", chains, limit=limit)


def rest_of_devices(*names: str) -> Domain:
    """What other arguments leave of the devices: their number by the product of these.

    Example:
        >>> [value.value for value in rest_of_devices("tp").values(Setting(8, 8, 32, {"tp": 2}))]
        [4]
    """

    def chains(at: Setting) -> list[list[int]]:
        left = at.devices
        for name in names:
            if name not in at.numbers:
                raise PlanError(
                    f"rest_of_devices('{name}'): the space has chosen {', '.join(at.numbers) or 'nothing'} so far; "
                    f"give '{name}' in front of it"
                )
            count = check_count(f"rest_of_devices: {name}", at.numbers[name])
            left = left // count if left % count == 0 else 0
        return [[left]] if left else []

    return Domain(f"rest_of_devices({', '.join(map(repr, names))})", chains)


def parts_of_batch(most: int | None = None, least: int = 1) -> Domain:
    """Numbers of micro-batches: divisors of the batch's rows, the fewest first, which run fastest and hold most.

    Args:
        most, least: the greatest and the smallest.

    Example:
        >>> [value.value for value in parts_of_batch(least=2).values(Setting(8, 8, 12))]
        [2, 3, 4, 6, 12]
    """
    check_count("parts_of_batch: least", least)
    if most is not None:
        check_count("parts_of_batch: most", most, least=least)
    text = ", ".join([f"most={most}"] * (most is not None) + [f"least={least}"] * (least > 1))
    limit = parts_of_batch(None, least) if most is not None else None

    def chains(at: Setting) -> list[list[int]]:
        return [[n for n in divisors(max(1, at.batch)) if least <= n and (most is None or n <= most)]]

    return Domain(f"parts_of_batch({text})", chains, True, limit, cuts_batch=True)


def whole_rows(name: str) -> Callable[[Mapping[str, Any]], bool]:
    """For ``where`` of a space: whether the rows of a micro-batch divide among ``name`` devices.

    Args:
        name: of an argument, or ``"devices"``.

    Example:
        >>> [whole_rows("dp")({"rows": rows, "dp": 4}) for rows in (2, 8)]
        [False, True]
    """
    return lambda numbers: numbers["rows"] % numbers[name] == 0


def some_layers(parts: int = 4) -> Domain:
    """Numbers of layers for `jscaler.plans.recompute_layers`: a part of a stage's layers, two parts, …; None for all.

    Args:
        parts: how many.

    Example:
        >>> [value.value for value in some_layers().values(Setting(8, 8, 32, layers=12))]
        [3, 6, 9, None]
    """
    check_count("some_layers: parts", parts)

    def chains(at: Setting) -> list[list[int | None]]:
        some = dict.fromkeys(at.layers * n // parts for n in range(1, parts))
        return [[*(n for n in some if n), None]]

    return Domain(f"some_layers({'' if parts == 4 else parts})", chains, True)


def as_domain(given: Any) -> Domain:
    """``given``, or the domain of a list's values, or of this value alone."""
    if isinstance(given, Domain):
        return given
    if isinstance(given, list | tuple | set | range):
        values: Sequence[Any] = [*given] if isinstance(given, Iterable) else []
        if not values:
            raise PlanError(f"a domain has no values: {shown(given)}")
        return one_of(*values)
    return Domain(repr(given), lambda at: [[given]])
