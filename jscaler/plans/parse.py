"""A plan's name with arguments, as a person types it: ``megatron(dp=2, tp=4)``. Literals only; nothing is evaluated."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jscaler.errors import PlanError, UnknownNameError


@dataclass(frozen=True)
class PlanCall:
    """A plan's name and its arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, factory: Callable[..., Any]) -> Any:
        """``factory`` with these arguments.

        Raises:
            UnknownNameError: it has no such argument.
            PlanError: the arguments do not fit it otherwise.
        """
        signature = inspect.signature(factory)
        names = list(signature.parameters)
        for argument in self.kwargs:
            if argument not in names:
                raise UnknownNameError("argument", argument, names, f" of plan '{self.name}'")
        try:
            bound = signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise PlanError(f"plan '{self.name}': {error}; its arguments are {', '.join(names) or 'none'}") from error
        return factory(*bound.args, **bound.kwargs)


def parse_call(text: str) -> tuple[str, PlanCall | None]:
    """The name in ``text``, and its arguments if it has parentheses.

    Raises:
        PlanError: what is in the parentheses is no list of literals.

    Example:
        >>> parse_call("megatron(dp=2, tp=4)")
        ('megatron', PlanCall(name='megatron', args=(), kwargs={'dp': 2, 'tp': 4}))
    """
    name, opening, rest = text.strip().partition("(")
    if not opening:
        return name, None
    try:
        call = ast.parse(f"plan({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("more than one pair of parentheses")
        args = tuple(map(ast.literal_eval, call.args))
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        if len(kwargs) < len(call.keywords):
            raise ValueError("** is no argument")
    except (SyntaxError, ValueError) as error:
        raise PlanError(
            f"cannot read the plan '{text}': write its arguments as literals, such as megatron(dp=2, sequence=True)"
        ) from error
    return name.strip(), PlanCall(name.strip(), args, kwargs)
