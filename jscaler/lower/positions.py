"""Layouts and adapters as they would be on any group: with positions in the place of devices."""

import dataclasses
from collections.abc import Hashable
from typing import Any

from jscaler.materialize import Adapter, DeviceMesh, Layout

_REST = tuple(field.name for field in dataclasses.fields(Layout) if field.name != "mesh")


class Positions:
    """Of what lies on the devices of one group a key, which is equal for what lies so on another."""

    def __init__(self, group: DeviceMesh):
        self._position = {d: i for i, d in enumerate(group.devices)}
        self._known: dict[int, tuple[Any, Hashable]] = {}  # by identity of what is kept here, too

    def of(self, value: Any) -> Hashable:
        """The key of a layout, a mesh or an adapter, or of several."""
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if not dataclasses.is_dataclass(value):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._fields(value)
        return self._known[id(value)][1]

    def _fields(self, value: Any) -> Hashable:
        if isinstance(value, DeviceMesh):
            return tuple(map(self._position.__getitem__, value.devices)), value.axes
        if isinstance(value, Layout):  # all but the mesh is the same on any group
            return self.of(value.mesh), *(getattr(value, name) for name in _REST)
        if isinstance(value, Adapter):
            return self.of((value.source, value.target, value.stages))
        return tuple(self.of(getattr(value, field.name)) for field in dataclasses.fields(value))
