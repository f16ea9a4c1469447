"""The text of a plan file: JSON with one decision per line, so that two plans can be compared line by line.

::

    {
     "format": "jscaler plan",
     "version": 1,
     "name": "two_way",
     "devices": 2,
     "digest": "8c1f6e1a9f00",
     "told": {"model": "gpt", "size": "nano"},                            what the command line was told of the model
     "places": [
      [0, 1]                                                              device arrays, each once
     ],
     "rules": [
      "a b, b c -> a c; a 16, b 8 reduction, c 16"                        what the plan was made for: rules, each once,
     ],
     "ops": [
      {"op": "up/dot", "rule": 0}                                         and the ops that have them
     ],
     "decisions": [
      {"kind": "op_trans", "op": "up/dot", "axes": [{"factor": "c", "parts": 2}]},
      {"kind": "op_assign", "op": "up/dot", "index": [[0, 2]], "places": 0}
     ]
    }
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jscaler.errors import PlanFileError, near_names, shown
from jscaler.primitives.json_records import DeviceTable, Places, make, make_place, place_data, record
from jscaler.primitives.made_for import MadeFor, OpRecord, RuleRecord

FORMAT = "jscaler plan"
VERSION = 1
KEYS = ("format", "version", "name", "devices", "digest", "places", "rules", "ops", "decisions", "told")
Kinds = Mapping[str, type]


def decision_lines(decisions: Sequence[Any], kinds: Kinds, table: DeviceTable) -> list[str]:
    """Every decision as one line of JSON; arrays of places go to ``table``."""
    names = {kind: name for name, kind in kinds.items()}
    return [_json({"kind": names[type(d)], **record(d, table)}) for d in decisions]


def digest(num_devices: int, decisions: Sequence[Any], kinds: Kinds) -> str:
    """A short hash of what a file of these decisions says, names left out."""
    table = DeviceTable(exact=False)
    lines = decision_lines(decisions, kinds, table)
    lines += [_json(list(map(place_data, row))) for row in table.rows]
    return hashlib.sha256("\n".join([str(num_devices), *lines]).encode()).hexdigest()[:12]


def write(plan: Any, kinds: Kinds) -> str:
    """The text of a file of ``plan``, a `Plan`."""
    table = DeviceTable()
    decisions = decision_lines(plan.decisions, kinds, table)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": plan.name,
        "devices": plan.num_devices,
        "digest": plan.digest,
    }
    head |= {"told": dict(plan.told)} if plan.told else {}
    entries = [f"{_json(key)}: {_json(value)}" for key, value in head.items()]
    entries.append(_listed("places", [_json(list(map(place_data, row))) for row in table.rows]))
    if plan.made_for is not None:
        rules = list(dict.fromkeys(op.rule for op in plan.made_for.ops if op.rule is not None))
        number = {rule: i for i, rule in enumerate(rules)}
        ops = [{"op": op.path, **({"rule": number[op.rule]} if op.rule is not None else {})} for op in plan.made_for.ops]
        entries.append(_listed("rules", [_json(str(rule)) for rule in rules]))
        entries.append(_listed("ops", list(map(_json, ops))))
    entries.append(_listed("decisions", decisions))
    return "{\n " + ",\n ".join(entries) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(key: str, lines: Sequence[str]) -> str:
    inside = ",\n  ".join(lines)
    return f'"{key}": [\n  {inside}\n ]' if lines else f'"{key}": []'


def read(text: str, kinds: Kinds) -> dict[str, Any]:
    """The fields of the `Plan` that a file's text is of.

    Raises:
        PlanFileError: it is no plan file, of a newer version, or malformed.
    """
    if not isinstance(text, str):
        raise PlanFileError(f"a plan is read from text, as plan.to_json() has given it, not from {shown(text)}")
    try:
        data = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"it is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanFileError(f"it is no plan file: its 'format' is not '{FORMAT}'")
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise PlanFileError(f"its version is {version!r}, not a whole number from 1")
    if version > VERSION:
        raise PlanFileError(
            f"it is of version {version}, and this jscaler reads up to version {VERSION}; load it with the jscaler that "
            "wrote it, or a newer one than this"
        )
    for key in data:
        if key not in KEYS:
            near = near_names(key, KEYS)
            raise PlanFileError(f"'{key}' is nothing a plan file has; {f'did you mean {near[0]!r}?' if near else KEYS}")
    name, devices = _typed(data, "name", str), _typed(data, "devices", int)
    if devices < 1:
        raise PlanFileError(f"'devices' is {devices}; a plan is for one device or more")
    rows = [
        tuple(make_place(p, f"places[{i}][{j}]") for j, p in enumerate(_list(row, f"places[{i}]")))
        for i, row in enumerate(_typed(data, "places", list))
    ]
    decisions = tuple(_decision(d, kinds, rows, f"decisions[{i}]") for i, d in enumerate(_typed(data, "decisions", list)))
    said, found = data.get("digest"), digest(devices, decisions, kinds)
    if said not in (None, found):
        raise PlanFileError(
            f"its decisions were changed after it was written: they make the digest {found}, and the file says {said}; "
            "where that is meant, delete the line 'digest'"
        )
    made_for, told = _made_for(data), _told(data)
    return {"name": name, "num_devices": devices, "decisions": decisions, "made_for": made_for, "told": told}


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which would leave out all but the last of what it says of one key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanFileError(f"it says '{twice}' {names.count(twice)} times in one object; leave one")
    return found


def _decision(data: Any, kinds: Kinds, rows: Sequence[Places], where: str) -> Any:
    name = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in kinds:
        near = near_names(str(name), list(kinds))
        raise PlanFileError(
            f"{where} is of the kind {name!r}{f'; did you mean {near[0]!r}?' if near else ';'} known: {', '.join(kinds)}"
        )
    rest = {key: value for key, value in data.items() if key != "kind"}
    return make(kinds[name], rest, rows, f"{where} ({name})")


def _made_for(data: Mapping[str, Any]) -> MadeFor | None:
    if "ops" not in data:
        return None
    texts = _typed(data, "rules", list)
    rules = [RuleRecord.parse(text, f"rules[{i}]") for i, text in enumerate(texts)]
    ops = []
    for i, entry in enumerate(_typed(data, "ops", list)):
        path = entry.get("op") if isinstance(entry, dict) and entry.keys() <= {"op", "rule"} else None
        number = entry.get("rule") if path is not None else None
        known = number is None or (type(number) is int and 0 <= number < len(rules))
        if not isinstance(path, str) or not known:
            raise PlanFileError(f"ops[{i}] is {entry!r}, not an op's path and the number of one of {len(rules)} rules")
        ops.append(OpRecord(path, None if number is None else rules[number]))
    made_for = MadeFor(tuple(ops))
    if len(made_for.by_path) < len(ops):
        twice = next(op.path for i, op in enumerate(ops) if op.path in {before.path for before in ops[:i]})
        raise PlanFileError(f"'ops' has '{twice}' twice; leave one")
    return made_for


def _told(data: Mapping[str, Any]) -> dict[str, Any]:
    told = data.get("told", {})
    if not isinstance(told, dict):
        raise PlanFileError(f"'told' is {str(told)[:60]!r}; it must be options of the command line, by name")
    return told


def _typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    if type(value) is not kind:
        words = {str: "text", int: "a whole number", list: "a list"}
        raise PlanFileError(f"'{key}' is {'missing' if key not in data else repr(value)[:60]}; it must be {words[kind]}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanFileError(f"{where} is {value!r}, not a list")
    return value


def _path(path: Any) -> Path:
    if isinstance(path, str | os.PathLike):
        return Path(path).expanduser()
    raise PlanFileError(f"a plan's file is named by its path, as text or a pathlib.Path, not by {shown(path)}")


def save(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all: whoever reads meanwhile sees the old file or the new one.

    Raises:
        PlanFileError: there is no such folder, or it cannot be written to.
    """
    target = _path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise PlanFileError(f"'{target}' cannot be written: {getattr(error, 'strerror', None) or error}") from error


def load(path: str | os.PathLike[str]) -> str:
    """The text at ``path``.

    Raises:
        PlanFileError: there is no such file, or it is no text.
    """
    try:
        return _path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanFileError(f"'{os.fspath(path)}' cannot be read: {getattr(error, 'strerror', None) or error}") from error
