"""A plan's name with arguments, as a person types it: ``megatron(dp=2, tp=4)``, ``recompute_layers(zero3())``.

Literals, and plans, or lists of plans, as arguments of plans; nothing is evaluated.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jscaler.errors import PlanError, UnknownNameError

INNER = ("plan", "ends")  # what arguments are called that take another plan


@dataclass(frozen=True)
class PlanCall:
    """A plan's name and its arguments, plans among them."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, factory: Callable[..., Any], inner: Callable[["PlanCall | str"], Any] | None = None) -> Any:
        """``factory`` with these arguments.

        Args:
            inner: makes the policy of a plan that is an argument itself: of those in ``INNER``, which also take text,
                as ``"path.py:function"`` is no literal otherwise.

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
        for name, value in bound.arguments.items():
            several: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
            if name in INNER and inner is not None and all(isinstance(one, PlanCall | str) for one in several):
                by_text = {repr(one): inner(one) for one in several}  # equal plans are one policy
                made = [by_text[repr(one)] for one in several]
                bound.arguments[name] = made if isinstance(value, list | tuple) else made[0]
            elif calls := [one for one in several if isinstance(one, PlanCall)]:
                if name in INNER:
                    raise PlanError(f"plan '{self.name}': its argument '{name}' is a plan, or a list of plans alone")
                raise PlanError(f"plan '{self.name}': its argument '{name}' takes no plan, such as '{calls[0].name}'")
        if not factory.__module__.startswith("jscaler."):
            return factory(*bound.args, **bound.kwargs)  # of the user's own, who knows what it takes
        try:
            return factory(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise PlanError(f"plan '{self.name}': {error}; its arguments are {', '.join(names)}") from error


def parse_call(text: str) -> tuple[str, PlanCall | None]:
    """The name in ``text``, and its arguments if it has parentheses.

    Raises:
        PlanError: what is in the parentheses is no list of literals and plans.

    Example:
        >>> parse_call("megatron(dp=2, tp=4)")
        ('megatron', PlanCall(name='megatron', args=(), kwargs={'dp': 2, 'tp': 4}))
        >>> parse_call("recompute_layers(zero3(), every=2)")[1].args
        (PlanCall(name='zero3', args=(), kwargs={}),)
    """
    name, opening, rest = text.strip().partition("(")
    if not opening:
        return name, None
    try:
        call = ast.parse(f"plan({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("more than one pair of parentheses")
        return name.strip(), _plan_call(name.strip(), call)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise PlanError(
            f"cannot read the plan '{text[:80]}': write its arguments as literals, such as megatron(dp=2, tp=4), or as "
            "plans with parentheses, such as recompute_layers(zero3())"
        ) from error


def with_arguments(text: str, factory: Callable[..., Any], **values: Any) -> str:
    """The plan ``text`` of a ``factory`` with these arguments in place of what it says, or beside it.

    Raises:
        PlanError: it cannot be read.
        UnknownNameError: the plan has no such argument.

    Example:
        >>> from jscaler import plans
        >>> with_arguments("pipeline(2, 4, 'gpipe')", plans.pipeline, schedule="zb_h1")
        "pipeline(2, 4, 'zb_h1')"
    """
    name, call = parse_call(text)
    names = list(inspect.signature(factory).parameters)
    made = ast.parse(text if call is not None else f"{text}()", mode="eval").body
    assert isinstance(made, ast.Call)
    for argument, value in values.items():
        if argument not in names:
            raise UnknownNameError("argument", argument, names, f" of plan '{name}'")
        place = names.index(argument)
        made.keywords = [k for k in made.keywords if k.arg != argument]
        if place < len(made.args):
            made.args[place] = ast.Constant(value)
        else:
            made.keywords.append(ast.keyword(argument, ast.Constant(value)))
    return ast.unparse(made)


def _plan_call(name: str, call: ast.Call) -> PlanCall:
    kwargs = {str(k.arg): _value(k.value) for k in call.keywords if k.arg is not None}
    if len(kwargs) < len(call.keywords):
        raise ValueError("** is no argument")
    return PlanCall(name, tuple(map(_value, call.args)), kwargs)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _plan_call(node.func.id, node)
    if isinstance(node, ast.List):
        return [_value(one) for one in node.elts]
    return ast.literal_eval(node)
