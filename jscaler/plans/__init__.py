"""Ready plan policies. Each is a function that returns a policy; a policy may also be written by hand."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jscaler.errors import PlanError, UnknownNameError
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.single import single

PLANS: dict[str, Callable[..., Callable[..., None]]] = {"single": single, "data_parallel": data_parallel}


def by_name(name: str) -> Callable[..., Any]:
    """The policy called ``name``: a built-in one with its defaults, or a function in a file, ``path.py:function``.

    Raises:
        UnknownNameError: no plan, or no function in the file, has that name.
        PlanError: there is no such file.
    """
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function)
    if name not in PLANS:
        raise UnknownNameError("plan", name, PLANS, "; a policy of your own is path.py:function")
    return PLANS[name]()


def _from_file(path: Path, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise PlanError(f"no plan file at '{path}' (asked for its function '{function}')")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    if function not in functions:
        raise UnknownNameError("function", function, functions, f" in '{path}'")
    return getattr(module, function)


__all__ = ["PLANS", "by_name", "data_parallel", "single"]
