"""Rules that users write: those of their ops (`jscaler.op`), and of their primitives (`jscaler.register_rule`)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import CALLS, CUSTOM_CALLS, shape, shape_struct
from jscaler.capture.op_rule import ELLIPSIS, Matched, OpRule, as_rule
from jscaler.capture.user_op import OpCall, matched_rule, op_p
from jscaler.errors import RuleError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import REGISTRY, Part, Primitive, Spec, known

RuleOf = Callable[[core.JaxprEqn], "str | OpRule"]
LocalParams = Callable[[dict[str, Any], Sequence[Any], Sequence[Any]], Mapping[str, Any]]


def register_rule(
    primitive: core.Primitive,
    rule: str | OpRule | RuleOf | Primitive,
    *,
    blocked: str = "",
    reduce: Mapping[str, Combiner] | None = None,
    linear: str = "",
    local: LocalParams | None = None,
) -> None:
    """Tell how ops that hold ``primitive`` can be split; it goes before a rule that jscaler has.

    Args:
        primitive: a JAX primitive of yours, or one that jscaler lacks.
        rule: words for the dims of its operands and results (``"... -> ..."`` where it is elementwise), or a function
            that gives them for an equation, whose ``params`` and ``invars`` it may read; see `OpRule` for the keywords.
            Or a whole record, with all that jscaler may know of a primitive: see ``jscaler.lax_primitives``.
        blocked, reduce, linear: as for `OpRule`.
        local: gives the parameters that change at part shapes: ``local(params, operands, results)`` with
            ``jax.ShapeDtypeStruct`` objects of one part returns what replaces some of ``params``.

    Raises:
        TypeError: not a primitive, or one that is opened before rules are asked (``jit``, ``custom_vjp_call``).
        RuleError: the rule cannot be read; at capture, it does not fit an equation's shapes.

    Example:
        >>> from jax.extend.core import Primitive
        >>> jscaler.register_rule(Primitive("row_softmax"), "... n -> ... n", blocked="n")
    """
    if not isinstance(primitive, core.Primitive):
        raise TypeError(f"register_rule takes a primitive, not {primitive!r}; for a function there is @jscaler.op")
    if primitive.name in CALLS | CUSTOM_CALLS or primitive is op_p:
        raise TypeError(f"'{primitive.name}' is opened, and what it calls is asked for rules; it can have none of its own")
    if (isinstance(rule, Primitive) or callable(rule)) and (blocked or reduce or linear):
        raise TypeError("a function of an equation returns an OpRule, to which blocked, reduce and linear belong")
    if isinstance(rule, Primitive):
        REGISTRY[primitive] = rule
        return
    read = None if callable(rule) else as_rule(rule, blocked, reduce, linear=linear)

    def spec(eqn: core.JaxprEqn) -> Spec:
        shapes = _shapes(eqn)
        found = read or as_rule(rule(eqn))  # type: ignore[operator]
        return found.match(*shapes, f"'{eqn.primitive.name}'").spec(*shapes)

    def shaped(part: Part, eqn: core.JaxprEqn) -> Mapping[str, Any]:
        own = [[shape_struct(v.aval.update(shape=part.shape(v))) for v in vs] for vs in (eqn.invars, eqn.outvars)]
        return local(dict(eqn.params), *own) if local is not None else {}

    ours = known(primitive)
    REGISTRY[primitive] = dataclasses.replace(
        ours, spec=spec, shaped=shaped, bound=None, windows=None, even_only=ours.spec is None or ours.even_only
    )


def _shapes(eqn: core.JaxprEqn) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [shape(v) for v in eqn.invars], [shape(v) for v in eqn.outvars]


def shown_name(eqn: core.JaxprEqn) -> str:
    """What messages call an equation: its primitive; a user's op by its function."""
    return eqn.params["call"].name if eqn.primitive is op_p else eqn.primitive.name


SubDims = Callable[[Any], Sequence[Sequence[tuple[int, int]]]]  # of a variable: per dim its sub-dims as (size, parts)


def bind_call(eqn: core.JaxprEqn, values: Sequence[Any], subdims: SubDims, kept: bool) -> list[Any]:
    """The results of one part of a call of a user's op.

    Args:
        kept: whether the part stays a user op, so that it can be split again; else it is opened.

    Raises:
        RuleError: the function fails at part shapes, or its results have not the shapes that the rule says.
    """
    rule = matched_rule(eqn)
    parts = _word_parts(eqn, rule, subdims)
    call = eqn.params["call"].at(parts)
    run = functools.partial(op_p.bind, **{**eqn.params, "call": call}) if kept else call
    results = _called(call, run, values, parts, rule)
    check_shapes(eqn, results, [_part_shape(v, subdims) for v in eqn.outvars], str(rule.text))
    return results


def check_shapes(eqn: core.JaxprEqn, results: Sequence[Any], wanted: Sequence[tuple[int, ...]], rule: str = "") -> None:
    """Check that the results of one part have the shapes that the rule says.

    Raises:
        RuleError: they have not.
    """
    for i, (result, own, var) in enumerate(zip(results, wanted, eqn.outvars, strict=True)):
        if result.shape != own:
            name, found = shown_name(eqn), f"shape {result.shape}, and the rule says {own}, of {shape(var)} in all"
            raise RuleError(rule or name, f"result {i} of a part of '{name}' has {found}")


def _called(
    call: OpCall, run: Callable[..., Any], values: Sequence[Any], parts: Mapping[str, int], rule: Matched
) -> list[Any]:
    try:
        return list(run(*values))
    except Exception as error:
        cut = ", ".join(f"'{name}' in {count} parts" for name, count in parts.items() if count > 1)
        if not cut or isinstance(error, RuleError):
            raise
        shapes = ", ".join(str(list(v.shape)) for v in values)
        name = getattr(call, "name", call)
        raise RuleError(
            str(rule.text), f"'{name}' fails on parts of shapes {shapes} ({cut}): {error}; it must work at part shapes, or "
            "block the factor"
        ) from error  # fmt: skip


def _part_shape(atom: Any, subdims: SubDims) -> tuple[int, ...]:
    if not isinstance(atom, core.Var):
        return shape(atom)
    pairs = zip(shape(atom), subdims(atom), strict=True)
    return tuple(size // math.prod(n for _, n in dim) for size, dim in pairs)


def _word_parts(eqn: core.JaxprEqn, rule: Matched, subdims: SubDims) -> dict[str, int]:
    """In how many parts each factor of a user's op is cut."""
    found: dict[str, int] = {}
    sizes = dict(rule.sizes)
    for var, words in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
        for names, dim in zip(words, subdims(var) if isinstance(var, core.Var) else (), strict=False):
            rest = list(dim)
            for name in names:
                mine: list[tuple[int, int]] = []
                while math.prod(s for s, _ in mine) < sizes[name]:
                    mine.append(rest.pop(0))
                found[name] = math.prod(n for _, n in mine)
    return found


def user_names(eqns: Sequence[core.JaxprEqn], leaves: Callable[[core.Var], Sequence[Sequence[int]]]) -> dict[int, str]:
    """Names of leaf atoms from the words of users' ops: their factors are called as their authors call them."""
    names: dict[int, str] = {}
    for eqn in eqns:
        if eqn.primitive is not op_p:
            continue
        rule = matched_rule(eqn)
        for var, words in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
            for mine, dim in zip(words, leaves(var) if isinstance(var, core.Var) else (), strict=False):
                dim = dim[-1:] if len(mine) == 1 else dim  # of several views' rows the rows
                if len(mine) == len(dim):
                    for leaf, name in zip(dim, mine, strict=True):
                        if name not in names.values() and not name.startswith(ELLIPSIS):
                            names.setdefault(leaf, name)
    return names
