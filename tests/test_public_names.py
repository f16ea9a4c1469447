"""Every public name says what it is, what it takes and raises, and has an example that runs: docs/api.md lists them."""

import dataclasses
import doctest
import functools
import inspect
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_docs import blocks

import jscaler
from jscaler.primitives.planner import Planner

API = "docs/api.md"
STEPS = ("Parallelized", "Lowered", "Compiled", "Planner", "Plan", "OpRule")  # classes whose methods may raise
RAISE_NOTHING = ("Planner.of_kind", "Planner.rule", "Planner.factor_names", "Planner.select_inputs", "Planner.plan")
DEVICES = 4  # of the planner in the examples, as of their step


def public() -> dict[str, Any]:
    """Name -> what is called so: all that ``import jscaler`` gives, and the public members of its classes."""
    text = (Path(__file__).parent.parent / API).read_text()
    internal = set(re.findall(r"\w+", " ".join(re.findall(r":exclude-members: (.*)", text))))
    found: dict[str, Any] = {
        "Planner": Planner,
        "nnx.grad": jscaler.nnx.grad,
        "nnx.value_and_grad": jscaler.nnx.value_and_grad,
    }
    found |= {name: getattr(jscaler, name) for name in jscaler.__all__}
    found |= {f"plans.{name}": getattr(jscaler.plans, name) for name in jscaler.plans.__all__}
    found = {name: one for name, one in found.items() if not isinstance(one, types.ModuleType | dict)}
    for name, one in list(found.items()):
        if inspect.isclass(one) and not issubclass(one, BaseException):
            members = {key: member for key, member in inspect.getmembers(one) if key[0] != "_" and key not in internal}
            found |= {f"{name}.{key}": member for key, member in members.items() if _written_here(member)}
    return found


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "func", member)


def _written_here(member: Any) -> bool:
    function = _function(member)
    return inspect.isroutine(function) and (getattr(function, "__module__", None) or "").startswith("jscaler")


def _parameters(one: Any) -> list[str]:
    """What an object is made of, or a function is called with."""
    if inspect.isclass(one):
        fields = dataclasses.fields(one) if dataclasses.is_dataclass(one) else ()
        return [f.name for f in fields if f.init] or list(getattr(one, "_fields", ()))
    if isinstance(one, property | functools.cached_property):
        return []
    return [name for name in inspect.signature(one).parameters if name != "self"]


def _section(text: str, *titles: str) -> str:
    """The indented lines below a title of a docstring."""
    return "".join(re.findall(rf"^(?:{'|'.join(titles)})[^\n]*:\n((?:[ ]+[^\n]*\n?|\n)*)", text, re.MULTILINE))


def lacks(name: str, one: Any, everything: dict[str, Any]) -> list[str]:
    """What its docstring does not say."""
    text, owner = inspect.getdoc(one) or "", name.rpartition(".")[0]
    if not text or text == inspect.getdoc(type(one)):
        return ["a docstring"]
    named = _section(text, "Args", "Attributes")
    missing = [f"'{p}'" for p in _parameters(one) if not re.search(rf"^[^:\n]*\b{p}\b[^:\n]*:", named, re.MULTILINE)]
    raises = owner in ("", "plans", "nnx", *STEPS) and inspect.isroutine(one) and _parameters(one)
    if raises and name not in RAISE_NOTHING and not _section(text, "Raises"):
        missing.append("what it raises")
    examples = text if owner not in everything else text + (inspect.getdoc(everything[owner]) or "")
    shown = ">>>" in text or (owner in everything and re.search(rf"(?:>>>|\.\.\.) .*\b{name.split('.')[-1]}\b", examples))
    return missing if shown else [*missing, "an example"]


def test_every_public_name_is_documented() -> None:
    everything = public()
    found = {name: lacks(name, one, everything) for name, one in everything.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


@pytest.mark.one_day_in(3)
def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "examples"}
    exec(blocks("python", API)[0].replace('jax.config.update("jax_num_cpu_devices", 8)', ""), names)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    said: list[str] = []
    texts = {inspect.getdoc(one) or "": name for name, one in public().items()}  # zero3 and fsdp are one
    for text, name in texts.items():
        given = names | {"graph": Planner(names["graph"], DEVICES), "devices": np.arange(DEVICES)}
        runner.run(doctest.DocTestParser().get_doctest(text, given, name, None, None), out=said.append)
    assert "".join(said) == ""
