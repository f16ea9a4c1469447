"""``OpenSpace``: a policy with holes on a mesh, in micro-batches. A point of it is an integer program."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jscaler.errors import PlanError, check_count, shown
from jscaler.spaces.numbers import Domain, Setting, as_domain, meshes, parts_of_batch
from jscaler.spaces.space import Opening, Point


def opened() -> Any:
    """Makes nothing: what is open has to be filled first."""
    raise AssertionError("a point with holes is filled")


@dataclass(frozen=True)
class OpenSpace:
    """A policy with holes, filled by an integer program for each mesh and number of micro-batches.

    Attributes:
        policy: a function of ``(graph, devices)``: ``jscaler.spaces.alpa``, say; devices have the mesh's shape.
        mesh: a domain of shapes.
        microbatches: a domain of numbers.

    Example:
        >>> from jscaler import spaces as s
        >>> space = s.OpenSpace(s.alpa, mesh=s.meshes(axes=2), microbatches=[1, 4])
        >>> [point.text for point in space.points(s.Setting(devices=4, per_host=4, batch=32))][:2]
        ['alpa(mesh=(4,), microbatches=1)', 'alpa(mesh=(4,), microbatches=4)']
    """

    policy: Callable[..., Any]
    mesh: Any = field(default_factory=meshes)
    microbatches: Any = field(default_factory=parts_of_batch)

    def __post_init__(self) -> None:
        if not callable(self.policy):
            raise PlanError(f"OpenSpace takes a policy with holes, policy(graph, devices), not {shown(self.policy)}")
        if isinstance(self.mesh, tuple) and all(isinstance(size, int) for size in self.mesh):
            object.__setattr__(self, "mesh", [self.mesh])

    @property
    def name(self) -> str:
        """The policy's."""
        return getattr(self.policy, "__name__", type(self.policy).__name__)

    def __str__(self) -> str:
        return f"{self.name}(mesh={self.mesh}, microbatches={self.microbatches})"

    def points(self, at: Setting) -> Iterator[Point]:
        """A point for each mesh and number of micro-batches."""
        for mesh in as_domain(self.mesh).values(at):
            if not isinstance(mesh.value, tuple | list) or not all(isinstance(n, int) and n > 1 for n in mesh.value):
                raise PlanError(f"OpenSpace: a mesh is the sizes of its axes, each 2 or more, not {shown(mesh.value)}")
            if math.prod(mesh.value) != at.devices:
                continue
            for count in as_domain(self.microbatches).values(at):
                check_count("OpenSpace: microbatches", count.value)
                numbers = {"space": self.name, "mesh": mesh.value, "microbatches": count.value}
                text = f"{self.name}(mesh={mesh.value}, microbatches={count.value})"
                opening = Opening(self.policy, tuple(mesh.value), count.value, at.rows_of)
                family = self.policy, mesh.value, count.chain
                yield Point(text, opened, numbers, family, (count.rank,), (count.saves,), opening, (self.policy,))

    def unlimited(self) -> "Iterator[tuple[str, OpenSpace]]":
        """For each domain that has a limit, its text and the space without that limit."""
        for name in ("mesh", "microbatches"):
            domain = getattr(self, name)
            if isinstance(domain, Domain) and domain.limit is not None:
                yield f"{name}={domain}", replace(self, **{name: domain.limit})
