"""``Space``: a policy whose arguments have domains. Each choice of values is a `Point`: a policy without holes."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jscaler import plans
from jscaler.errors import PlanError, UnknownNameError, check_count, shown
from jscaler.plans.batch import BATCH
from jscaler.spaces.numbers import Domain, Setting, Value, as_domain
from jscaler.tables.stage_chain import StageChain

Policy = Callable[..., Any]


@dataclass(frozen=True)
class Opening:
    """What of a point is open: a policy with holes, on a mesh, in micro-batches."""

    policy: Policy
    mesh: tuple[int, ...]
    microbatches: int
    batch: str = BATCH


@dataclass(frozen=True)
class StageOpening:
    """What of a point is open: where stages are cut, how many devices each has, and its plan.

    Attributes:
        plans: by the number of a stage's devices, its plans.
        counts: how many stages there may be.
    """

    plans: dict[int, tuple["Point", ...]]
    counts: tuple[int, ...]
    microbatches: int
    schedule: str


@dataclass(frozen=True)
class Point:
    """A policy with values for all its arguments.

    Attributes:
        text: of a built-in plan, as `jscaler.plans.by_name` reads it.
        make: makes the policy, or the finished plan.
        numbers: value by argument; those of a plan inside of another as ``"plan.tp"``.
        family: what has no order: points of one family differ in ``ranks`` alone.
        ranks: the place of each value in its chain.
        saves: of each, whether a higher rank holds less memory.
        opening: of a policy with holes, or of stages that are not cut, what is to be filled; else None.
        policies: policies of one's own that it is made of, which the text has by their names alone.
        stages: of a plan in stages that follow each other, what is known of their order.
    """

    text: str
    make: Callable[[], Any] = field(compare=False)
    numbers: Mapping[str, Any] = field(compare=False)
    family: tuple[Any, ...]
    ranks: tuple[int, ...]
    saves: tuple[bool, ...] = field(compare=False)
    opening: Opening | StageOpening | None = field(default=None, compare=False)
    policies: tuple[Any, ...] = ()
    stages: StageChain | None = field(default=None, compare=False)

    @property
    def key(self) -> object:
        """What tells it from all others."""
        return self.text, self.policies

    def is_behind(self, other: "Point") -> bool:
        """Whether it computes and sends at least as much as ``other``, of one family."""
        return self.family == other.family and all(a >= b for a, b in zip(self.ranks, other.ranks, strict=True))

    def holds_less(self, other: "Point") -> bool:
        """Whether it differs from ``other``, of one family, by ranks that save memory, or not at all."""
        pairs = zip(self.ranks, other.ranks, self.saves, strict=True)
        return self.family == other.family and all(a >= b if saves else a == b for a, b, saves in pairs)


@dataclass(frozen=True)
class InEachStage:
    """Spaces for the devices of one stage, of which the argument ``stages`` says how many there are."""

    spaces: tuple["Space", ...]
    stages: str = "stages"


def in_each_stage(*spaces: "Space", stages: str = "stages") -> InEachStage:
    """Spaces for the plan of one stage, on the devices of that stage.

    Args:
        stages: which argument of the plan around it says how many stages there are; it is given in front of this one.
    """
    if not spaces or not all(isinstance(space, Space) for space in spaces):
        raise PlanError(f"in_each_stage takes spaces, one or more, not {shown(spaces)}")
    return InEachStage(spaces, stages)


class Space:
    """A policy with holes: arguments that have a domain in place of a value.

    Args:
        policy: the name of a built-in plan; or a function of ``(graph, devices, **numbers)``, a policy with arguments.
        where: a function of the chosen numbers (a dict; those of an inner plan as ``"plan.tp"``), of ``"devices"``, and of
            ``"rows"``, of the batch or of a micro-batch of the plan around it: whether they go together.
        alone: with these values the policy is the ``plan`` inside of it: ``{"microbatches": 1}``.
        numbers: by argument a `Domain`, a list of values, a value; or a `Space`, or a list of spaces, for a plan inside of
            another. They are chosen in the order in which they are given.

    Raises:
        UnknownNameError: no built-in plan has that name, or the policy no such argument.
        PlanError: the policy is none.

    Example:
        >>> from jscaler import spaces as s
        >>> megatron = s.Space("megatron", tp=s.within_host(), dp=s.rest_of_devices("tp"))
        >>> [point.text for point in megatron.points(s.Setting(devices=4, per_host=4, batch=32))]
        ['megatron(dp=4, tp=1)', 'megatron(dp=2, tp=2)', 'megatron(dp=1, tp=4)']
    """

    def __init__(
        self, policy: Any, *, where: Callable[[Mapping[str, Any]], bool] | None = None,
        alone: Mapping[str, Any] | None = None, **numbers: Any,
    ):  # fmt: skip
        if isinstance(policy, str):
            name = plans.ALIASES.get(policy, policy)
            if name not in plans.PLANS:
                raise UnknownNameError("plan", policy, [*plans.PLANS, *plans.ALIASES], "; or give a policy: a function")
            self.name, self._factory = name, plans.PLANS[name]
            self._parameters = dict(inspect.signature(self._factory).parameters)
        elif callable(policy):
            self.name, self._factory = getattr(policy, "__name__", type(policy).__name__), None
            self._parameters = dict([*inspect.signature(policy).parameters.items()][2:])
        else:
            raise PlanError(f"a space is laid over a built-in plan's name or a policy, not {shown(policy)}")
        kinds = inspect.Parameter
        for name in (*numbers, *(alone or ())):
            anything = any(one.kind is kinds.VAR_KEYWORD for one in self._parameters.values())
            if name not in self._parameters and not anything:
                raise UnknownNameError("argument", name, [*self._parameters], f" of '{self.name}'")
        missing = [name for name in alone or () if name not in numbers]
        if self._factory is None:
            several = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
            needed = [n for n, one in self._parameters.items() if one.default is kinds.empty and one.kind not in several]
            missing += [name for name in needed if name not in numbers]
        if missing:
            raise PlanError(f"'{self.name}' needs {', '.join(missing)}: give each a domain or a value")
        if where is not None and not callable(where):
            raise PlanError(f"where is a function of the chosen numbers, not {shown(where)}")
        self.policy, self.numbers, self.where, self.alone = policy, numbers, where, alone

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={_text(value)}' for name, value in self.numbers.items())})"

    def points(self, at: Setting) -> Iterator[Point]:
        """All choices of values that go together, in order."""
        for chosen in self._choices(at, [*self.numbers.items()]):
            numbers = _flat(chosen)
            if self.where is None or self.where({"devices": at.devices, "rows": at.batch, **numbers}):
                yield self._point(chosen, numbers, at.rows_of)

    def unlimited(self) -> "Iterator[tuple[str, Space]]":
        """For each domain that has a limit, its text and the space without that limit."""
        for name, given in self.numbers.items():
            domain = given if isinstance(given, Domain) else None
            if domain is not None and domain.limit is not None:
                wider = self._with(name, domain.limit)
                yield f"{name}={domain}", wider
            for index, inner in enumerate(_spaces(given)):
                for text, wider in inner.unlimited():
                    yield text, self._with(name, _with(given, index, wider))

    def _with(self, name: str, domain: Any) -> "Space":
        return Space(self.policy, where=self.where, alone=self.alone, **{**self.numbers, name: domain})

    def _choices(self, at: Setting, rest: list[tuple[str, Any]]) -> Iterator[dict[str, Value]]:
        if not rest:
            yield {}
            return
        (name, given), *others = rest
        for value in _values(name, given, at):
            inner = replace(at, numbers={**at.numbers, name: value.value}, batch=at.batch // value.parts)
            for more in self._choices(inner, others):
                yield {name: value, **more}

    def _point(self, chosen: Mapping[str, Value], numbers: Mapping[str, Any], batch: str) -> Point:
        family: list[Any] = [self.name if self._factory is not None else self.policy]
        ranks: list[int] = []
        saves: list[bool] = []
        for name, value in chosen.items():
            if isinstance(value.value, Point):
                family.append((name, value.value.family))
                ranks += value.value.ranks
                saves += value.value.saves
            else:
                family.append((name, value.chain))
                ranks.append(value.rank)
                saves.append(value.saves)
        given = {name: value.value for name, value in chosen.items()}
        if self.alone is not None and all(given[name] == value for name, value in self.alone.items()):
            inner: Point = given["plan"]
            return replace(inner, numbers=numbers, family=tuple(family), ranks=tuple(ranks), saves=tuple(saves))
        if batch != BATCH and "batch" in self._parameters:
            given.setdefault("batch", batch)
        inside = [policy for value in given.values() if isinstance(value, Point) for policy in value.policies]
        own = (*([] if self._factory is not None else [self.policy]), *inside)
        make = functools.partial(self._make, given)
        stages_of = plans.STAGE_CHAINS.get(self.name) if self._factory is not None else None
        stages = None if stages_of is None else stages_of(**given)
        return Point(self._call(given), make, numbers, tuple(family), tuple(ranks), tuple(saves), None, own, stages)

    def _call(self, given: Mapping[str, Any]) -> str:
        """The call as a person writes it: what must be given by position, and nothing that is so by default."""
        written = {name: value.text if isinstance(value, Point) else repr(value) for name, value in given.items()}
        said: list[str] = []
        for name, parameter in self._parameters.items():
            if name in written and parameter.default is inspect.Parameter.empty:
                said.append(written[name])
            elif name in written and parameter.default != given[name]:
                said.append(f"{name}={written[name]}")
        return f"{self.name}({', '.join(said)})"

    def _make(self, given: Mapping[str, Any]) -> Policy:
        values = {name: value.make() if isinstance(value, Point) else value for name, value in given.items()}
        if self._factory is not None:
            return self._factory(**values)

        own: Any = self.policy

        def policy(graph: Any, devices: Any) -> Any:
            return own(graph, devices, **values)

        policy.__name__ = self.name
        return policy


def _spaces(given: Any) -> tuple[Space, ...]:
    if isinstance(given, InEachStage):
        return given.spaces
    several = [given] if isinstance(given, Space) else given if isinstance(given, list | tuple) else []
    return tuple(one for one in several if isinstance(one, Space))


def _with(given: Any, index: int, space: Space) -> Any:
    """``given`` with another of its spaces in the place ``index``."""
    spaces = [*_spaces(given)]
    spaces[index] = space
    return replace(given, spaces=tuple(spaces)) if isinstance(given, InEachStage) else spaces


def _values(name: str, given: Any, at: Setting) -> Iterator[Value]:
    spaces = _spaces(given)
    if not spaces:
        yield from as_domain(given).values(at)
        return
    inner = replace(at, numbers={})
    if isinstance(given, InEachStage):
        if given.stages not in at.numbers:
            raise PlanError(f"in_each_stage: '{given.stages}' is not chosen yet; give it in front of '{name}'")
        count = check_count(f"in_each_stage: {given.stages}", at.numbers[given.stages])
        if at.devices % count:
            return
        devices = at.devices // count
        inner = replace(inner, devices=devices, per_host=min(at.per_host, devices), layers=at.layers // count)
    yield from map(Value, itertools.chain.from_iterable(space.points(inner) for space in spaces))


def _flat(chosen: Mapping[str, Value]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in chosen.items():
        if isinstance(value.value, Point):
            called = value.value.text.partition("(")[0]
            found |= {name: called} | {f"{name}.{inner}": one for inner, one in value.value.numbers.items()}
        else:
            found[name] = value.value
    return found


def _text(given: Any) -> str:
    if isinstance(given, InEachStage):
        return f"in_each_stage({', '.join(map(str, given.spaces))})"
    if isinstance(given, list | tuple) and any(isinstance(one, Space) for one in given):
        return f"[{', '.join(map(str, given))}]"
    return str(given) if isinstance(given, Domain | Space) else repr(given)
