"""Flat frozen dataclasses as JSON values and back, driven by the types of their fields. What plan files are made of.

A field that has its default is left out, so that a kind of decision may gain fields without a new version of the format.
Long arrays of places, which many decisions share, are kept once, in a table, and referred to by number.
"""

import dataclasses
import functools
import importlib
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jscaler.errors import PlanFileError, near_names, shown
from jscaler.ir import Place
from jscaler.primitives.prefix import Prefix
from jscaler.rules.expansion import Expanding

Places = tuple[Place, ...]
Devices = tuple[int, ...]
ALGORITHMS: Mapping[str, type] = {"Prefix": Prefix}  # ours, by name; those of users go by their import path


@dataclass
class DeviceTable:
    """The device arrays of a file, each once, in the order in which decisions first name them.

    Attributes:
        exact: whether all that goes in must come out again; a digest also takes what no file can hold.
    """

    exact: bool = True
    rows: list[Places] = field(default_factory=list)
    _known: dict[Places, int] = field(default_factory=dict)
    _seen: dict[int, tuple[int, Places]] = field(default_factory=dict)  # by identity: hashing thousands is slow

    def number(self, places: Places) -> int:
        """Which row ``places`` are; a new one where they are none yet."""
        if id(places) not in self._seen:
            if places not in self._known:
                self._known[places] = len(self.rows)
                self.rows.append(places)
            self._seen[id(places)] = self._known[places], places
        return self._seen[id(places)][0]


def record(value: Any, table: DeviceTable) -> dict[str, Any]:
    """A dataclass as a JSON object; fields that have their default are left out."""
    hints = _fields(type(value))
    return {
        f.name: encode(hints[f.name], getattr(value, f.name), table)
        for f in dataclasses.fields(value)
        if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
    }


def encode(hint: Any, value: Any, table: DeviceTable) -> Any:
    """``value``, which is of type ``hint``, as a JSON value."""
    if hint is Places:
        return table.number(value)
    if hint is Devices:
        return table.number(tuple(map(Place, value)))
    if isinstance(value, Place):
        return place_data(value)
    if isinstance(value, tuple):
        kinds = next((h for h in (hint, *get_args(hint)) if get_origin(h) is tuple), tuple[Any, ...])
        inner = get_args(kinds)
        return [encode(inner[0] if inner[-1] is Ellipsis else inner[i], v, table) for i, v in enumerate(value)]
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if hint is not None and _is_algorithm(hint):
        return algorithm_data(value) if table.exact else algorithm_text(value)
    return record(value, table) if dataclasses.is_dataclass(value) else operator.index(value)


def place_data(place: Place) -> int | str:
    """``3``, or ``"3@host"``."""
    return int(place.device) if place.space == "device" else f"{place.device}@{place.space}"


def make(kind: type, data: Any, rows: Sequence[Places], where: str) -> Any:
    """The dataclass ``kind`` that ``data`` describes.

    Raises:
        PlanFileError: a field is missing, not known or of another type; ``where`` says in which part of the file.
    """
    if not isinstance(data, dict):
        raise PlanFileError(f"{where} is {shown(data)}, not an object")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            near = near_names(name, list(fields))
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(fields)}"
            raise PlanFileError(f"{where} has no field '{name}'; {hint}")
    for name, known in fields.items():
        if name not in data and known.default is dataclasses.MISSING:
            raise PlanFileError(f"{where} lacks its field '{name}'")
    hints = _fields(kind)
    return kind(**{name: decode(hints[name], value, rows, f"{where}.{name}") for name, value in data.items()})


def decode(hint: Any, data: Any, rows: Sequence[Places], where: str) -> Any:
    """The value of type ``hint`` that ``data`` stands for; raises PlanFileError as `make` does."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Places or hint is Devices:
        number = decode(int, data, rows, where)
        if not 0 <= number < len(rows):
            raise PlanFileError(f"{where} is row {number} of 'places', which has {len(rows)}")
        return rows[number] if hint is Places else tuple(place.device for place in rows[number])
    if origin in (types.UnionType, Union):
        return _one_of(inner, data, rows, where)
    if origin is tuple and isinstance(data, list):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(decode(inner[0], v, rows, f"{where}[{i}]") for i, v in enumerate(data))
        if len(inner) == len(data):
            return tuple(decode(h, v, rows, f"{where}[{i}]") for i, (h, v) in enumerate(zip(inner, data, strict=True)))
    if origin is Literal and data in inner:
        return data
    if hint is Place:
        return make_place(data, where)
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if hint in (str, int, bool) and type(data) is hint:
        return data
    if hint in (None, types.NoneType) and data is None:
        return None
    if _is_algorithm(hint):
        return make_algorithm(data, where)
    if dataclasses.is_dataclass(hint):
        return make(hint, data, rows, where)  # type: ignore[arg-type]
    raise PlanFileError(f"{where} is {shown(data)}, not {_type_text(hint)}")


def _one_of(hints: Sequence[Any], data: Any, rows: Sequence[Places], where: str) -> Any:
    wanted = [h for h in hints if h is not types.NoneType]
    if data is None and len(wanted) < len(hints):
        return None
    if len(wanted) == 1:
        return decode(wanted[0], data, rows, where)
    for hint in wanted:
        try:
            return decode(hint, data, rows, where)
        except PlanFileError:
            continue
    raise PlanFileError(f"{where} is {shown(data)}, not {' or '.join(map(_type_text, wanted))}")


def make_place(data: Any, where: str) -> Place:
    """The place that ``3`` or ``"3@host"`` stands for."""
    if isinstance(data, str):
        device, _, space = data.partition("@")
        if device.isdecimal() and space in ("device", "host"):
            return Place(int(device), space)  # type: ignore[arg-type]
    elif type(data) is int and data >= 0:
        return Place(data)
    raise PlanFileError(f"{where} is {shown(data)}, not a device's number, or '<number>@host'")


def algorithm_data(algorithm: Any) -> dict[str, Any]:
    """An algorithm by name, or by import path where it is a user's own, and its fields.

    Raises:
        PlanFileError: another process could not make it again from that.
    """
    kind = type(algorithm)
    name = next((n for n, known in ALGORITHMS.items() if known is kind), f"{kind.__module__}:{kind.__qualname__}")
    if not dataclasses.is_dataclass(kind):
        raise PlanFileError(f"{name} cannot be saved: it is no dataclass; make it a frozen dataclass, in a module")
    fields = {f.name: _plain(getattr(algorithm, f.name), f"{name}.{f.name}") for f in dataclasses.fields(kind)}
    data = {"name": name, "fields": fields}
    if name not in ALGORITHMS and (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__):
        what = "in the script that runs" if kind.__module__ == "__main__" else "inside a function"
        raise PlanFileError(
            f"{name} cannot be saved: it is defined {what}, where no other process finds it; define it at the top level of "
            "a module that can be imported"
        )
    if make_algorithm(data, name) != algorithm:
        raise PlanFileError(f"{name} cannot be saved: made again from its fields {fields} it is not equal to itself")
    return data


def algorithm_text(algorithm: Any) -> Any:
    """The same for a digest: of what no file can hold the name."""
    try:
        return algorithm_data(algorithm)
    except PlanFileError:
        return type(algorithm).__qualname__


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, tuple):
        return [_plain(v, where) for v in value]
    raise PlanFileError(f"{where} is a {type(value).__name__}: a plan file holds numbers, text and tuples of these")


def make_algorithm(data: Any, where: str) -> Any:
    """The algorithm that ``algorithm_data`` described; a user's own is imported, and nothing else of its module is run."""
    if not isinstance(data, dict) or data.keys() != {"name", "fields"} or not isinstance(data["fields"], dict):
        raise PlanFileError(f"{where} is {shown(data)}, not an object with 'name' and 'fields'")
    name = str(data["name"])
    kind = ALGORITHMS.get(name) or _imported(name, where)
    fields = {str(k): _tuples(v) for k, v in data["fields"].items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise PlanFileError(f"{where}: {name} cannot be made of {fields}: {error}") from error


def _imported(path: str, where: str) -> type:
    module, colon, name = path.partition(":")
    if not colon:
        near = near_names(path, list(ALGORITHMS))
        raise PlanFileError(
            f"{where}: no algorithm named '{path}'{f'; did you mean {near[0]!r}?' if near else ''}; built in: "
            f"{', '.join(ALGORITHMS)}; one of your own is written 'module:class'"
        )
    try:
        kind = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PlanFileError(
            f"{where}: the algorithm '{path}' cannot be imported ({error}); the module that defines it must be found here, "
            "under the same name as where the plan was made"
        ) from error
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and callable(getattr(kind, "expand", None))):
        raise PlanFileError(f"{where}: '{path}' is no algorithm: not a dataclass with an expand method")
    return kind


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass; `Places` and `Devices` where they hold arrays of devices."""
    found = get_type_hints(kind)
    arrays = {name: Places for name, hint in found.items() if hint == Places}
    devices = {"devices": Devices} if found.get("devices") == tuple[int, ...] else {}
    return found | arrays | devices


def _is_algorithm(hint: Any) -> bool:
    return hint is Expanding or Expanding in get_args(hint)


def _type_text(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    words = {str: "text", int: "a whole number", bool: "true or false", float: "a number"}
    return words.get(hint, "a list" if get_origin(hint) is tuple else f"a {getattr(hint, '__name__', hint)}")
