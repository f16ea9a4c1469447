"""``jscaler.verify_rule``: does a rule say what its op does? Whole against parts, forward and backward."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from rich.table import Table

from jscaler.capture.bodies import BodyTable, holds_custom_vjp
from jscaler.capture.jaxprs import dtype, evaluate, shape, trace_flat
from jscaler.capture.wishes import no_mesh
from jscaler.errors import CaptureError, RuleError, UnknownNameError, VerificationError, shown
from jscaler.ir import Factor
from jscaler.text.tables import table
from jscaler.verification.whole_against_parts import FragmentInParts, PartsComparison, compare_all

PARTS = (2, 3, 4)


@dataclass(frozen=True)
class RuleCheck:
    """One factor in so many parts, and how far parts and whole are apart.

    Attributes:
        direction: ``forward``, ``backward``, or either with saved residuals.
        difference: the largest of any result, as a fraction of the result's largest element.
    """

    direction: str
    factor: str
    size: int
    kind: str
    parts: int
    difference: float


@dataclass(frozen=True)
class RuleReport:
    """What `verify_rule` ran.

    Attributes:
        rules: by direction the rule.
        checks: what agreed.
        blocked: (direction, factor, why) of what cannot be split, and was not run.
    """

    rules: dict[str, str]
    checks: tuple[RuleCheck, ...]
    blocked: tuple[tuple[str, str, str], ...]

    def rows(self) -> list[dict[str, Any]]:
        """The checks as plain data."""
        return [asdict(check) for check in self.checks]

    def __rich__(self) -> Table:
        title = "\n".join(f"{direction}: {rule}" for direction, rule in self.rules.items())
        rows = [tuple(row.values()) for row in self.rows()]
        reasons: dict[tuple[str, str], str] = {}  # the backward is mostly blocked for the forward's reasons
        for direction, factor, why in self.blocked:
            reasons.setdefault((factor, why), direction)
        rows += [(direction, factor, "", "blocked", "", why) for (factor, why), direction in reasons.items()]
        return table(title, ("direction", "factor", "size", "kind", "parts", "difference"), rows)


@no_mesh()
def verify_rule(
    fun: Callable[..., Any] | core.Primitive, *args: Any, factors: Iterable[str] | None = None, parts: Sequence[int] = PARTS
) -> RuleReport:
    """Run whole against parts for every factor that the rule of ``fun`` leaves open, forward and backward.

    Args:
        fun: a function of arrays: an `op`, a plain function, or a primitive (without parameters) that has a rule.
        args: what to call it with; 64-bit floats find more than 32-bit ones.
        factors: those to try; every open one by default.
        parts: numbers of parts, of which those that divide a factor's size are tried.

    Returns:
        A report that prints as a table with rich, and whose ``rows()`` are plain data.

    Raises:
        VerificationError: the rule lies; with the factor, the parts, the result and the difference. Or nothing was tried.
        UnknownNameError: there is no such factor, or it is blocked.
        CaptureError: ``fun`` is no function, or an argument no array.

    Example:
        >>> report = jscaler.verify_rule(jnp.matmul, np.ones((4, 6)), np.ones((6, 8)))
        >>> sorted({check.factor for check in report.checks if check.direction == "forward"})
        ['a', 'b', 'c']
    """
    (report,) = verify_rules([(fun, args)], factors, parts)
    return report


@no_mesh()
def verify_rules(
    calls: Sequence[tuple[Callable[..., Any] | core.Primitive, Sequence[Any]]],
    factors: Iterable[str] | None = None,
    parts: Sequence[int] = PARTS,
) -> list[RuleReport]:
    """`verify_rule` of several functions with their arguments, compiled together."""
    wanted = None if factors is None else list(factors)
    prepared = [_prepared(fun, args, wanted, parts) for fun, args in calls]
    split = [one.comparison for runs, _ in prepared for one in runs if one.splits]  # what is not split is not run
    found = iter(compare_all(split, one_by_one=True))
    reports = []
    for runs, blocked in prepared:
        checks = [check for one in runs if one.splits for check in one.checks(next(found))]
        refused = [(one.direction, f.name, f.reason) for one in runs for f in one.factors if f.kind == "blocked"]
        rules = {one.direction: str(one.comparison.made.rule) for one in runs}
        reports.append(RuleReport(rules, tuple(checks), (*blocked, *refused)))
    return reports


@dataclass(frozen=True)
class _Run:
    """One direction of a function, and how it is going to be split."""

    direction: str
    splits: list[tuple[str, int]]
    comparison: PartsComparison

    @property
    def factors(self) -> list[Factor]:
        return list(self.comparison.made.rule.factors.values())

    def checks(self, differences: Sequence[float]) -> list[RuleCheck]:
        factors = self.comparison.made.rule.factors
        return [
            RuleCheck(self.direction, f, factors[f].size, factors[f].kind, n, off)
            for (f, n), off in zip(self.splits, differences, strict=True)
        ]


def _prepared(
    fun: Any, args: Sequence[Any], wanted: list[str] | None, parts: Sequence[int]
) -> tuple[list[_Run], list[tuple[str, str, str]]]:
    """The directions of a function with the splits to try, and why there is no backward."""
    if not callable(fun) and not isinstance(fun, core.Primitive):
        raise CaptureError(f"verify_rule takes a function or a primitive, and then its arguments, not {shown(fun)}")
    call = fun.bind if isinstance(fun, core.Primitive) else fun
    name = getattr(fun, "__name__", None) or getattr(fun, "name", type(fun).__name__)
    args = tuple(_value(x, i) for i, x in enumerate(args))
    jaxpr = trace_flat(lambda *xs: jax.tree.leaves(call(*xs)), [jax.typeof(x) for x in args])
    made = FragmentInParts.of(jaxpr)
    for factor in wanted or ():
        if factor not in made.open:
            raise UnknownNameError("open factor", factor, made.open, f" in '{name}' ({made.rule})")
    blocked: list[tuple[str, str, str]] = []
    directions: list[tuple[str, core.Jaxpr, Sequence[Any]]] = [("forward", jaxpr, args)]
    try:
        directions += _backwards(jaxpr, args)
    except (NotImplementedError, ValueError) as error:  # JAX's words for what has no derivative
        blocked.append(("backward", "", str(error)))
    runs = []
    for direction, one, values in directions:
        own = FragmentInParts.of(one)
        named = [f for f in own.open if wanted is None or f in wanted]
        splits = [(f, n) for f in named for n in parts if n > 1 and own.open[f] % n == 0]
        what = f"{name}, {direction}"
        programs = [_program(what, own, f, n) for f, n in splits]
        runs.append(_Run(direction, splits, PartsComparison(own, values, [{f: n} for f, n in splits], programs, what)))
    if made.open and not any(one.splits for one in runs):
        sizes = ", ".join(f"{f} ({n})" for f, n in made.open.items() if wanted is None or f in wanted)
        raise VerificationError(
            f"{name}: nothing could be tried: of {sizes}, none divides into {', '.join(map(str, parts))} parts; give other "
            "sizes, or parts="
        )
    return runs, blocked


def _value(x: Any, index: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise CaptureError(f"verify_rule runs what it verifies: argument {index} is a shape, give it an array of numbers")
    try:
        return x if hasattr(x, "dtype") else jnp.asarray(x)
    except (TypeError, ValueError):
        raise CaptureError(f"verify_rule: argument {index} is an array or a number, not {shown(x)}") from None


def _program(what: str, made: FragmentInParts, factor: str, n: int) -> core.Jaxpr:
    """The program of one part; says which it is that cannot even be traced."""
    try:
        return made.local({factor: n})
    except RuleError as error:
        raise VerificationError(f"{what}: {factor} in {n} parts: {error}") from error
    except Exception as error:
        raise VerificationError(f"{what}: {made.rule}: the function fails for {factor} in {n} parts: {error}") from error


def _backwards(jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[tuple[str, core.Jaxpr, list[Any]]]:
    """The backward of a body, and where it may save residuals both halves of that, with values to run them on."""
    wrt = tuple(i for i, x in enumerate(args) if _is_real(x))
    outputs = tuple(i for i, v in enumerate(jaxpr.outvars) if _is_real(v.aval))
    if not wrt or not outputs:
        return []
    bodies, rng = BodyTable(), np.random.default_rng(7)
    body = bodies.intern(jaxpr)
    seen = [jaxpr.outvars[i] for i in outputs]
    cotangents = [np.asarray(rng.normal(size=shape(v)), dtype(v)) for v in seen]
    backward, kept = bodies.backward_of(body, wrt, outputs)
    full = [*args, *cotangents]
    found = [("backward", backward.jaxpr, [full[i] for i in kept])]
    if holds_custom_vjp(jaxpr):
        saved = bodies.saved_of(body, wrt, outputs)
        results = jax.jit(lambda *xs: evaluate(saved.forward.jaxpr, xs))(*args)
        full = [*args, *results, *cotangents]
        found.append(("forward, saved", saved.forward.jaxpr, list(args)))
        found.append(("backward, saved", saved.backward.jaxpr, [full[i] for i in saved.kept]))
    return found


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
