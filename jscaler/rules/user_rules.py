"""Rules that users write: those of their ops (`jscaler.op`), and of their primitives (`jscaler.register_rule`)."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import CALLS, CUSTOM_CALLS, shape, shape_struct
from jscaler.capture.op_rule import ELLIPSIS, Matched, OpRule, Words, as_rule
from jscaler.capture.user_op import Call, op_p
from jscaler.errors import RuleError
from jscaler.ir.mask import Combiner
from jscaler.rules.table import Dims, Label, Spec

RuleOf = Callable[[core.JaxprEqn], "str | OpRule"]
LocalParams = Callable[[dict[str, Any], Sequence[Any], Sequence[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Registered:
    """A primitive's rule, and its parameters at part shapes."""

    rule: RuleOf
    local: LocalParams | None


# The one table that users write to, as they write to JAX's own with mlir.register_lowering. It is read at capture.
REGISTRY: dict[core.Primitive, Registered] = {}


def register_rule(
    primitive: core.Primitive,
    rule: str | OpRule | RuleOf,
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
        local: gives the parameters that change at part shapes: ``local(params, operands, results)`` with
            ``jax.ShapeDtypeStruct``s of one part returns what replaces some of ``params``.

    Raises:
        TypeError: not a primitive, or one that is opened before rules are asked (``jit``, ``custom_vjp_call``).
        RuleError: the rule cannot be read; at capture, it does not fit an equation's shapes.

    Example:
        >>> jscaler.register_rule(row_softmax_p, "... n -> ... n", blocked="n")
    """
    if not isinstance(primitive, core.Primitive):
        raise TypeError(f"register_rule takes a primitive, not {primitive!r}; for a function there is @jscaler.op")
    if primitive.name in CALLS | CUSTOM_CALLS or primitive is op_p:
        raise TypeError(f"'{primitive.name}' is opened, and what it calls is asked for rules; it can have none of its own")
    if callable(rule):
        if blocked or reduce or linear:
            raise TypeError("a function of an equation returns an OpRule, to which blocked, reduce and linear belong")
        REGISTRY[primitive] = Registered(rule, local)
        return
    read = as_rule(rule, blocked, reduce, linear=linear)
    REGISTRY[primitive] = Registered(lambda _: read, local)


def user_spec(eqn: core.JaxprEqn) -> Spec | None:
    """The spec of an equation whose rule a user wrote; None for any other."""
    matched = matched_rule(eqn)
    return None if matched is None else _spec(matched, [shape(v) for v in eqn.invars], [shape(v) for v in eqn.outvars])


def shown_name(eqn: core.JaxprEqn) -> str:
    """What messages call an equation: its primitive; a user's op by its function."""
    return eqn.params["call"].name if eqn.primitive is op_p else eqn.primitive.name


def matched_rule(eqn: core.JaxprEqn) -> Matched | None:
    """The rule that a user wrote for an equation, at its shapes."""
    shapes = [shape(v) for v in eqn.invars], [shape(v) for v in eqn.outvars]
    if eqn.primitive is op_p:
        return eqn.params["call"].matched(*shapes)
    if eqn.primitive not in REGISTRY:
        return None
    rule = REGISTRY[eqn.primitive].rule(eqn)
    return as_rule(rule).match(*shapes, f"'{eqn.primitive.name}'")


def _spec(rule: Matched, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Spec:
    sizes = dict(rule.sizes)
    blocked: dict[Label, str] = {(name, sizes[name]): why for name, why in rule.blocked if name in sizes}

    def tensor(side: str, index: int, words: Words, dims: tuple[int, ...]) -> Dims:
        labels = []
        for d, (names, size) in enumerate(zip(words, dims, strict=True)):
            if size > 1 and not names:
                blocked[(side, index, d), size] = "its rule has no word for it"
                labels.append((((side, index, d), size),))
            else:
                labels.append(tuple((n, sizes[n]) for n in names))
        return tuple(labels)

    combiner: Any = next((c for n, c in rule.reduce if n not in dict(rule.blocked)), "add")
    ins = tuple(tensor("in", i, w, s) for i, (w, s) in enumerate(zip(rule.operands, operands, strict=True)))
    outs = tuple(tensor("out", i, w, s) for i, (w, s) in enumerate(zip(rule.results, results, strict=True)))
    return Spec(ins, outs, combiner, blocked, rule.linear)


SubDims = Callable[[Any], Sequence[Sequence[tuple[int, int]]]]  # of a variable: per dim its sub-dims as (size, parts)


def bind_part(eqn: core.JaxprEqn, values: Sequence[Any], subdims: SubDims, kept: bool = False) -> list[Any] | None:
    """The results of one part of an equation whose rule a user wrote; None for any other.

    Args:
        kept: whether the part of a user op stays one, so that it can be split again; else it is opened.

    Raises:
        RuleError: the function fails at part shapes, or its results have not the shapes that the rule says.
    """
    rule = matched_rule(eqn)
    if rule is None:
        return None
    if eqn.primitive is op_p:
        parts = _word_parts(eqn, rule, subdims)
        call = eqn.params["call"].at(parts)
        run = functools.partial(op_p.bind, **{**eqn.params, "call": call}) if kept else call
        name, results = call.name, _called(call, run, values, parts, rule)
    else:
        name, results = eqn.primitive.name, _bind_registered(eqn, values, subdims)
    for i, (result, var) in enumerate(zip(results, eqn.outvars, strict=True)):
        if result.shape != _part_shape(var, subdims):
            raise RuleError(
                str(rule.text), f"result {i} of a part of '{name}' has shape {result.shape}, and the rule says "
                f"{_part_shape(var, subdims)}, of {shape(var)} in all",
            )  # fmt: skip
    return results


def _called(
    call: Call, run: Callable[..., Any], values: Sequence[Any], parts: Mapping[str, int], rule: Matched
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


def _bind_registered(eqn: core.JaxprEqn, values: Sequence[Any], subdims: SubDims) -> list[Any]:
    local, params = REGISTRY[eqn.primitive].local, dict(eqn.params)
    if local is not None:
        own = [[shape_struct(v.aval.update(shape=_part_shape(v, subdims))) for v in vs] for vs in (eqn.invars, eqn.outvars)]
        params |= local(params, *own)
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


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
        rule = matched_rule(eqn) if eqn.primitive is op_p else None
        if rule is None:
            continue
        for var, words in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
            for mine, dim in zip(words, leaves(var) if isinstance(var, core.Var) else (), strict=False):
                if len(mine) == len(dim):
                    for leaf, name in zip(dim, mine, strict=True):
                        if name not in names.values() and not name.startswith(ELLIPSIS):
                            names.setdefault(leaf, name)
    return names
