"""Whether arguments of plans are of the types that their signatures say: in a plan's text, and in a call, anything may be
typed."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import numpy as np

from jscaler.errors import PlanError, shown

CHECKED_THERE = ("batch", "dp", "tp")  # of which plans say more than their type
P = ParamSpec("P")


def checked(factory: Callable[P, Callable[..., None]]) -> Callable[P, Callable[..., None]]:
    """``factory``, which makes a policy of its arguments, with `check_types` behind its own checks, which say more.

    The policy bears its name.
    """

    @functools.wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> Callable[..., None]:
        try:
            policy = factory(*args, **kwargs)
        except TypeError:
            _check_call(factory, args, kwargs)
            raise
        _check_call(factory, args, kwargs)
        policy.__name__ = factory.__name__
        return policy

    return made


def _check_call(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        bound = inspect.signature(factory).bind(*args, **kwargs)
    except TypeError:
        return  # Python says what it takes
    check_types(factory.__name__, factory, bound.arguments)


def check_types(plan: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises PlanError where an argument is none of the types of its annotation."""
    signature = inspect.signature(factory)
    for name, value in arguments.items():
        wanted = signature.parameters[name].annotation
        if (name not in CHECKED_THERE or value is None) and not matches(value, wanted):
            said = " or ".join("None" if one is type(None) else _word(one) for one in _choices(wanted))
            raise PlanError(f"plan '{plan}': its argument '{name}' is {said}, not {shown(value)}")


def matches(value: Any, wanted: Any) -> bool:
    """Whether ``value`` is of the type ``wanted``; what is no type known here matches all.

    Example:
        >>> matches(["a", 3], Sequence[str]), matches({"a": None}, Mapping[str, int | None]), matches(3, Callable | None)
        (False, True, False)
        >>> matches("a", Sequence[str]), matches("a", Sequence[int])  # a text is one of it
        (True, False)
    """
    return any(_matches_one(value, one) for one in _choices(wanted))


def _matches_one(value: Any, wanted: Any) -> bool:
    origin, inner = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if origin is typing.Literal:
        return value in inner and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if isinstance(origin, str):  # a name for type checkers alone: of what can be typed, text
        return not isinstance(value, (bool, int, float, complex, bytes, list, tuple, dict, set))
    if origin is Any or not isinstance(origin, type):
        return True
    if origin is int and isinstance(value, np.integer):
        return True
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        return False
    if origin is Mapping and inner:
        return all(matches(k, inner[0]) and matches(v, inner[1]) for k, v in value.items())
    if origin is not Sequence or not inner:
        return True
    return matches(value, inner[0]) if isinstance(value, str) else all(matches(v, inner[0]) for v in value)


def _choices(wanted: Any) -> tuple[Any, ...]:
    return typing.get_args(wanted) if typing.get_origin(wanted) in (types.UnionType, typing.Union) else (wanted,)


def _word(one: Any) -> str:
    if typing.get_origin(one) is Callable or one is Callable:
        return "a plan"
    if typing.get_origin(one) is Sequence and typing.get_origin(typing.get_args(one)[0]) is Callable:
        return "a list of plans"
    return one.__name__ if isinstance(one, type) and not typing.get_args(one) else str(one).replace("collections.abc.", "")
