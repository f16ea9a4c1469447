"""``Members``: which devices take part in a collective, in which order, in the terms of the mesh a program runs over."""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.materialize import DeviceMesh
from jscaler.materialize.mesh import Axes

MOST_ORDERS = 4  # axes up to which every order of their names is compared


@dataclass(frozen=True)
class Members:
    """The groups of a collective, or of the devices that hold the parts of one thing.

    Attributes:
        size: the number of members of each group.
        names: the program's mesh axes that it runs along, major first; all of them where ``groups`` says more.
        groups: positions of the members of each group, in order; None where ``names`` alone say it.
    """

    size: int
    names: Axes
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def over(self) -> dict[str, Any]:
        """The arguments by which ``lax`` collectives know their members."""
        return {"axis_name": axis_names(self.names), "axis_index_groups": self.groups and [list(g) for g in self.groups]}

    def __str__(self) -> str:
        return " ".join(self.names) + (f" in groups {[list(g) for g in self.groups]}" if self.groups is not None else "")

    def index(self) -> Any:
        """This device's number within its group (a traced scalar)."""
        index = lax.axis_index(axis_names(self.names))
        if self.groups is None:
            return index
        table = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            table[list(group)] = range(len(group))
        return jnp.asarray(table)[index]


def axis_names(axes: Axes) -> Any:
    """Axis names as ``lax`` takes them: one by itself, several as a tuple."""
    return axes[0] if len(axes) == 1 else axes


@lru_cache(maxsize=4096)
def members(mesh: DeviceMesh, layout_mesh: DeviceMesh, axes: Axes) -> Members:
    """The members along ``axes`` of ``layout_mesh``, for a program over ``mesh``."""
    groups = _positions(mesh, layout_mesh, axes)
    names = _names(mesh, groups)
    if names is not None:
        return Members(len(groups[0]), names)
    return Members(len(groups[0]), mesh.names, tuple(tuple(group) for group in groups.tolist()))


def to_next(mesh: DeviceMesh, layout_mesh: DeviceMesh, axes: Axes) -> list[tuple[int, int]]:
    """From each member to the next of its group, round, as positions in ``mesh``."""
    groups = _positions(mesh, layout_mesh, axes)
    return list(zip(groups.ravel().tolist(), np.roll(groups, -1, axis=1).ravel().tolist(), strict=True))


def _positions(mesh: DeviceMesh, layout_mesh: DeviceMesh, axes: Axes) -> np.ndarray:
    """A row for each group along ``axes`` of ``layout_mesh``: where its members stand in ``mesh``."""
    position = {d: i for i, d in enumerate(mesh.devices)}
    return np.vectorize(position.__getitem__)(layout_mesh.groups(axes))


def _names(mesh: DeviceMesh, groups: np.ndarray) -> Axes | None:
    """The axes of ``mesh`` whose groups these are, member by member."""
    sizes = [size for _, size in mesh.axes]
    coordinates = np.unravel_index(groups[0], sizes)
    varying = [n for n, c in zip(mesh.names, coordinates, strict=True) if len(set(c.tolist())) > 1]
    if len(varying) > MOST_ORDERS or mesh.size(tuple(varying)) != groups.shape[1]:
        return None
    positions = DeviceMesh(tuple(range(len(mesh.devices))), mesh.axes)
    listed = groups[np.argsort(groups[:, 0])]
    for names in itertools.permutations(varying):
        found = positions.groups(names)
        if (found[np.argsort(found[:, 0])] == listed).all():
            return names
    return None
