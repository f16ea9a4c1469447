"""A cluster as a TOML file, with a kind of device of one's own where wanted."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jscaler.clusters.cluster import Cluster
from jscaler.clusters.device import DEVICE_KINDS, DeviceKind, Peak, Reached, find_kind
from jscaler.clusters.link import Link, is_positive, usual_links
from jscaler.clusters.unlike import UnlikeCluster, joined
from jscaler.errors import DeviceError, UnknownNameError, shown

_PEAKS = tuple(field.name for field in dataclasses.fields(Peak))
_FIELDS = tuple(field.name for field in dataclasses.fields(DeviceKind) if field.name not in ("peak", "reached"))
_REACHED = tuple(field.name for field in dataclasses.fields(Reached) if field.name != "products")
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Reached) if f.default is not dataclasses.MISSING}
_FRACTIONS = ("bandwidth", "clock")  # of the fields, those that need not be whole numbers
_HOSTS = ("name", "hosts", "devices_per_host", "memory", "device", "inside", "between")


class _Place(NamedTuple):
    """What is read: a file, or one of its kinds of hosts; as errors say it."""

    text: str
    stem: str

    def __str__(self) -> str:
        return self.text


def cluster_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The text of a file that ``load_cluster`` reads back as an equal cluster; ``comments`` are lines at its head."""
    lines = [f"# {comment}" for comment in comments]
    if not isinstance(cluster, UnlikeCluster):
        return "\n".join([*lines, *_hosts_toml(cluster, "")]) + "\n"
    lines.append(f"name = {_quoted(cluster.name)}")
    for part in cluster.kinds:
        lines += ["", "[[kinds]]", *_hosts_toml(part, "kinds.")]
    for *pair, link in cluster.across:
        lines += ["", "[[across]]", f"kinds = {pair}", *_link_toml(link, "host")]
    return "\n".join(lines) + "\n"


def _hosts_toml(cluster: Cluster, inside: str) -> list[str]:
    """Equal hosts; their tables stand in the table ``inside``."""
    lines = [f"name = {_quoted(cluster.name)}"]
    lines += [f"{key} = {getattr(cluster, key)}" for key in ("hosts", "devices_per_host")]
    kind = cluster.device
    if cluster.memory and (kind is None or cluster.memory != kind.memory):
        lines.append(f"memory = {cluster.memory}  # bytes per device")
    built_in = kind is not None and DEVICE_KINDS.get(kind.name) == kind
    if kind is not None and built_in:
        lines.append(f"device = {_quoted(kind.name)}")
    for key, owner in (("inside", "device"), ("between", "host")):
        lines += ["", f"[{inside}{key}]", *_link_toml(getattr(cluster, key), owner)]
    if kind is not None and not built_in:
        lines += _device_toml(kind, f"{inside}device")
    return lines


def _link_toml(link: Link, owner: str) -> list[str]:
    return [
        f"latency = {link.latency!r}  # seconds per step", f"bandwidth = {link.bandwidth!r}  # bytes per second and {owner}"
    ]  # fmt: skip


def _device_toml(kind: DeviceKind, table: str) -> list[str]:
    values: dict[str, Any] = {name: getattr(kind, name) for name in _FIELDS}
    values["capability"] = ".".join(map(str, kind.capability))
    lines = ["", f"[{table}]", *(f"{k} = {_quoted(v) if isinstance(v, str) else repr(v)}" for k, v in values.items())]
    lines += ["", f"[{table}.peak]", *_rates(kind.peak)]
    if kind.reached is not None:
        shown = [f"{name} = {getattr(kind.reached, name)!r}" for name in _REACHED]
        lines += ["", f"[{table}.reached]", *shown, f"[{table}.reached.products]", *_rates(kind.reached.products)]
    return lines


def _rates(peak: Peak) -> list[str]:
    return [f"{name} = {rate!r}" for name, rate in vars(peak).items() if rate]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster from TOML.

    ``device`` says what compiling for the cluster needs: the name of a built-in kind, or a table. A table with ``like``
    says only what differs from that kind. The links may be left out where they are usual for the kind.

    Example::

        name = "lab"                   # the file's name when left out
        hosts = 2
        devices_per_host = 4
        memory = 25_769_803_776        # bytes per device; the device's own when left out
        device = "A100-80GB"           # may be left out; or a table [device]
        [inside]
        latency = 9e-6                 # seconds per step
        bandwidth = 25e9               # bytes per second and device
        [between]
        latency = 30e-6
        bandwidth = 12.5e9             # bytes per second and host

    Hosts of several kinds or sizes are a table ``[[kinds]]`` each, with these fields; ``[[across]]`` says the links of a
    host to hosts of another kind, ``kinds = [0, 1]``, which are the slower of both otherwise. Devices are numbered in the
    order of the tables.

    Raises:
        DeviceError: the file cannot be read, or a field is missing or of the wrong kind.
        UnknownNameError: a field or a device kind is unknown.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DeviceError(
            f"cannot read the cluster file {path}: {error}; `jscaler bench-comm --out {path}` writes such a file"
        ) from None
    place = _Place(str(path), path.stem)
    if "kinds" not in table:
        return _hosts(place, table)
    _refuse_unknown(place, table, ("name", "kinds", "across"), "")
    kinds, across = (_tables(place, table, key) for key in ("kinds", "across"))
    if not kinds:
        raise DeviceError(f"{path}: 'kinds' is empty; give a table [[kinds]] for each kind of hosts")
    parts = [_hosts(_Place(f"{path}: kinds {n}", path.stem), own) for n, own in enumerate(kinds)]
    links = tuple(_across(_Place(f"{path}: across {n}", ""), own) for n, own in enumerate(across))
    return joined(_text(place, table, "name", path.stem), parts, links)


def _tables(path: _Place, table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DeviceError(f"{path}: '{key}' is {shown(found)}; give tables [[{key}]]")
    return found


def _across(path: _Place, table: dict[str, Any]) -> tuple[int, int, Link]:
    _refuse_unknown(path, table, ("kinds", "latency", "bandwidth"), "")
    pair = table.get("kinds")
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(one) is int for one in pair):
        raise DeviceError(f"{path}: 'kinds' is {shown(pair)}; give the numbers of two kinds, such as [0, 1]")
    return pair[0], pair[1], Link(*(_number(path, table, key, float) for key in ("latency", "bandwidth")))


def _hosts(path: _Place, table: dict[str, Any]) -> Cluster:
    """Equal hosts; with their own name, or that of the file."""
    _refuse_unknown(path, table, _HOSTS, "")
    hosts, devices_per_host = (_number(path, table, key, int) for key in ("hosts", "devices_per_host"))
    device = _device(path, table)
    links = usual_links(device, devices_per_host) if device is not None else None
    usual = dict(zip(("inside", "between"), links, strict=True)) if links is not None else {}
    inside, between = (
        usual[key] if key in usual and key not in table else _link(path, table, key) for key in ("inside", "between")
    )
    memory = _number(path, table, "memory", int) if "memory" in table else 0
    return Cluster(_text(path, table, "name", path.stem), hosts, devices_per_host, inside, between, memory, device)


def _text(path: _Place, table: dict[str, Any], key: str, default: str = "", where: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise DeviceError(f"{path}: '{where}{key}' is {shown(value)}; give text, in quotes")
    return value


def _link(path: _Place, table: dict[str, Any], key: str) -> Link:
    entry = table.get(key)
    if not isinstance(entry, dict):
        raise DeviceError(f"{path}: the table [{key}] with latency (seconds) and bandwidth (bytes/s) is missing")
    _refuse_unknown(path, entry, ("latency", "bandwidth"), f"{key}.")
    latency, bandwidth = (_number(path, entry, field, float, f"{key}.") for field in ("latency", "bandwidth"))
    return Link(latency, bandwidth)


def _device(path: _Place, table: dict[str, Any]) -> DeviceKind | None:
    entry = table.get("device")
    if entry is None:
        return None
    if isinstance(entry, str):
        return find_kind(entry, f" in {path}")
    if not isinstance(entry, dict):
        raise DeviceError(f"{path}: 'device' is {entry!r}; give a kind's name or a table [device]")
    _refuse_unknown(path, entry, ("like", *_FIELDS, "peak", "reached"), "device.")
    like = find_kind(_text(path, entry, "like", where="device."), f" in {path}") if "like" in entry else None
    known = {} if like is None else {name: getattr(like, name) for name in _FIELDS if name not in ("name", "description")}
    values = {**known, "name": path.stem, "threads_per_core": known.get("threads_per_core", 2048)}
    for name in _FIELDS:
        if name in entry or name not in (*values, "description"):
            values[name] = _device_field(path, entry, name)
    values.setdefault("description", values["name"])
    kind = DeviceKind(**values, peak=_peak(path, entry.get("peak"), like and like.peak, "peak"))
    return dataclasses.replace(kind, reached=_reached(path, entry.get("reached"), kind, like))


def _device_field(path: _Place, entry: dict[str, Any], name: str) -> Any:
    if name in ("name", "description"):
        return _text(path, entry, name, where="device.")
    if name == "capability":
        match = re.fullmatch(r"(\d+)\.(\d+)", str(entry.get(name)) if isinstance(entry.get(name), str) else "")
        if match is None:
            raise DeviceError(f"{path}: 'device.capability' is {entry.get(name)!r}; give it in quotes, like \"9.0\"")
        return int(match[1]), int(match[2])
    return _number(path, entry, name, float if name in _FRACTIONS else int, "device.")


def _peak(path: _Place, entry: Any, like: Peak | None, key: str) -> Peak:
    if entry is None and like is not None:
        return like
    if not isinstance(entry, dict):
        raise DeviceError(f"{path}: the table [device.{key}] with FLOP/s by type ({', '.join(_PEAKS)}) is missing")
    _refuse_unknown(path, entry, _PEAKS, f"device.{key}.")
    rates = {name: getattr(like, name) if like is not None else 0.0 for name in _PEAKS}
    rates |= {name: _number(path, entry, name, float, f"device.{key}.") for name in entry}
    if not (rates["float32"] and rates["float64"]):
        raise DeviceError(f"{path}: 'device.{key}' says no FLOP/s of float32 or of float64; give both")
    return Peak(**rates)


def _reached(path: _Place, entry: Any, kind: DeviceKind, like: DeviceKind | None) -> Reached | None:
    """What is reached of a kind: as said, else the share that is reached of the kind that it is like."""
    usual = None
    if like is not None and like.reached is not None:
        old, own = vars(like.peak), vars(kind.peak)
        known = vars(like.reached.products)
        usual_share = like.reached.products.float16 / like.peak.float16
        rates = {name: own[name] * (known[name] / rate if rate else usual_share) for name, rate in old.items()}
        bandwidth = like.reached.bandwidth * kind.bandwidth / like.bandwidth
        usual = dataclasses.replace(like.reached, products=Peak(**rates), bandwidth=bandwidth)
    if entry is None:
        return usual
    if not isinstance(entry, dict):
        raise DeviceError(f"{path}: 'device.reached' is {shown(entry)}; give a table [device.reached]")
    _refuse_unknown(path, entry, (*_REACHED, "products"), "device.reached.")
    known = vars(usual) if usual else _DEFAULTS
    values = {
        name: known[name] if name in known and name not in entry else _number(path, entry, name, float, "device.reached.")
        for name in _REACHED
    }
    products = _peak(path, entry.get("products"), usual and usual.products, "reached.products")
    return Reached(products=products, **values)


def _number(path: _Place, table: dict[str, Any], key: str, kind: type, where: str = "") -> Any:
    value: Any = table.get(key)
    if is_positive(value, kind):
        return kind(value)
    found = "missing" if value is None else f"{value!r}"
    raise DeviceError(f"{path}: '{where}{key}' is {found}; give a positive {'whole ' * (kind is int)}number")


def _refuse_unknown(path: _Place, table: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UnknownNameError("field", f"{where}{key}", [where + k for k in known], f" in {path}")
