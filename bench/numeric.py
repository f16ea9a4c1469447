"""What a layout means, in numpy: what each device holds of a tensor, and whether what devices hold is that.

The slow, obvious side of every numeric check of redistribution.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask, Share
from jscaler.materialize.layout import Layout, Values
from jscaler.verification.frames import cells_of
from jscaler.verification.whole_against_parts import COMBINE


def deal(layout: Layout, whole: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """What each device holds of ``whole``, by position: equal masks hold equal data, in the layout's local shape.

    Value shares are drawn at random, and join to ``whole``; what pads short parts is random too.
    """
    held: dict[Mask, np.ndarray] = {}
    for position in range(len(layout.mesh.devices)):
        mask = layout.mask(position)
        if mask not in held:
            bare = Mask(mask.subdims, mask.box)
            for shares, part in _shares(cells_of(bare, whole), layout, layout.values, rng):
                held[Mask(mask.subdims, mask.box, shares)] = _padded(part, layout, rng)
    return [held[layout.mask(position)] for position in range(len(layout.mesh.devices))]


def _padded(part: np.ndarray, layout: Layout, rng: np.random.Generator) -> np.ndarray:
    local = layout.local_sizes
    full = rng.integers(0, 2, local).astype(part.dtype)
    full[tuple(slice(s) for s in part.shape)] = part
    return full.reshape(layout.local_shape)


def _shares(
    value: np.ndarray, layout: Layout, values: Values, rng: np.random.Generator
) -> Iterator[tuple[tuple[Share, ...], np.ndarray]]:
    """Break ``value`` into nested random shares, the outermost first."""
    if not values:
        yield (), value
        return
    (axis, combiner), *rest = values
    count = layout.mesh.size(axis)
    drawn = rng.integers(-3, 4, (count, *value.shape)).astype(value.dtype)
    if combiner == "add":
        drawn[0] = value - drawn[1:].sum(0)
    else:  # one share, another for each element, holds the extreme
        further = COMBINE["min" if combiner == "max" else "max"](value, value + drawn)
        holder = rng.integers(0, count, value.shape)
        drawn = np.where(np.arange(count).reshape(-1, *[1] * value.ndim) == holder, value, further)
    for position in range(count):
        for inner, part in _shares(drawn[position], layout, tuple(rest), rng):
            yield (Share(position, count, combiner), *inner), part


def joined(layout: Layout, parts: Sequence[np.ndarray]) -> list[tuple[Mask, np.ndarray]]:
    """Join the value shares of ``parts`` within each group of devices; (box, values) for each.

    Raises:
        VerificationError: a part has the wrong shape, or devices with equal masks hold different data.
    """
    held: dict[Mask, np.ndarray] = {}
    for position, part in enumerate(parts):
        if part.shape != layout.local_shape:
            raise VerificationError(f"position {position} of {layout} holds shape {part.shape}, not {layout.local_shape}")
        mask = layout.mask(position)
        inside = tuple(slice(b - a) for dim in mask.box for a, b in dim)
        known = held.setdefault(mask, part.reshape(layout.local_sizes)[inside])
        if not np.array_equal(known, part.reshape(layout.local_sizes)[inside]):
            raise VerificationError(f"position {position} of {layout} holds other data than its replicas")
    while any(mask.shares for mask in held):
        groups: dict[Mask, list[tuple[Share, np.ndarray]]] = {}
        for mask, part in held.items():  # the innermost share is joined first
            groups.setdefault(Mask(mask.subdims, mask.box, mask.shares[:-1]), []).append((mask.shares[-1], part))
        held = {}
        for mask, group in groups.items():
            assert sorted(share.position for share, _ in group) == list(range(group[0][0].count))
            held[mask] = COMBINE[group[0][0].combiner].reduce([part for _, part in group])
    return list(held.items())


def check_parts(layout: Layout, parts: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Check that ``parts``, by position, are ``whole`` in ``layout``.

    Raises:
        VerificationError: some device holds something else.
    """
    for mask, part in joined(layout, parts):
        expected = cells_of(mask, whole)
        if not np.array_equal(part, expected):
            where = tuple(int(i) for i in np.argwhere(part != expected)[0])
            raise VerificationError(
                f"{mask} of {layout}: at {where} of the part there is {part[where]}, expected {expected[where]}; "
                f"{int((part != expected).sum())} of {expected.size} elements are wrong"
            )
