"""Functions in Python files of the user's: ``path.py:function``, a policy or a job."""

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jscaler.errors import JscalerError, UnknownNameError


def function_in(path: Path, name: str, what: str, wrong: type[JscalerError]) -> Callable[..., Any]:
    """The function ``name`` of the file at ``path``. Files in its folder can be imported, as of a script.

    A file that has not changed is run once, so that a policy and a job in one file share its classes.

    Args:
        what: what the function is ("plan"), for the error.
        wrong: the class of errors about the file.

    Raises:
        UnknownNameError: the file has no such function; names the near one.
        JscalerError: of class ``wrong``: there is no such file, running it has failed, or the name is no function's.
    """
    if not path.is_file():
        raise wrong(f"no {what} file at '{path}' (asked for its function '{name}')")
    module = _run(path, what, wrong)
    if not hasattr(module, name):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UnknownNameError("function", name, functions, f" in '{path}'")
    function = getattr(module, name)
    if not callable(function):
        raise wrong(
            f"'{name}' in '{path}' is a {type(function).__name__}: a {what} is given as a function, path.py:function"
        )
    return function


def raised(error: BaseException, path: Path) -> str:
    """An error in words, with the line of the file at ``path`` from which it came."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno} of {error.filename})"
    files = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    where = f" (line {files[-1].lineno} of {path})" if files else ""
    return f"{type(error).__name__}: {error}{where}"


def _run(path: Path, what: str, wrong: type[JscalerError]) -> ModuleType:
    try:
        return _module(path.resolve(), path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:
        raise wrong(f"the {what} file '{path}' cannot be run: {raised(error, path)}") from error


@functools.cache
def _module(path: Path, changed: int) -> ModuleType:
    """The file as a module, which is run again when it has ``changed``."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.setdefault(path.stem, module)  # dataclasses look there for what annotations mean
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is module:
            del sys.modules[path.stem]
        raise
    return module
