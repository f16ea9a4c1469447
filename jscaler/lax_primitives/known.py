"""What is known of a primitive: all records by name, and those of users."""

from collections.abc import Iterable
from typing import TypeGuard

from jax.extend import core

from jscaler.lax_primitives import (
    contractions,
    elementwise,
    equal_blocks,
    generators,
    gpu_kernels,
    indexing,
    others,
    programs,
    reductions,
    shapes,
    windows,
)
from jscaler.lax_primitives.primitive import Primitive

FAMILIES = (
    elementwise, shapes, equal_blocks, reductions, contractions, windows, indexing, generators, programs, gpu_kernels,
    others,
)  # fmt: skip
TABLE: dict[str, Primitive] = {one.name: one for family in FAMILIES for one in family.RECORDS}
# The one table that users write to, by jscaler.register_rule, as they write to JAX's own with mlir.register_lowering. It
# goes before ours, and is read at capture.
REGISTRY: dict[core.Primitive, Primitive] = {}


def known(primitive: core.Primitive) -> Primitive:
    """What is known of a primitive."""
    return REGISTRY.get(primitive) or named(primitive.name)


def named(name: str) -> Primitive:
    """What is known of JAX's primitive of this name."""
    return TABLE.get(name) or Primitive(name)


def contracts(eqns: Iterable[core.JaxprEqn]) -> bool:
    """Whether there is a product among ``eqns``."""
    return any(known(eqn.primitive).role == "contracts" for eqn in eqns)


def is_fence(item: object) -> TypeGuard[core.JaxprEqn]:
    """Whether it is an equation that orders, and changes no value."""
    return isinstance(item, core.JaxprEqn) and known(item.primitive).fence


def may_merge(eqn: core.JaxprEqn) -> bool:
    """Whether equal copies of an equation are one: not where they stand for what is to be computed again."""
    one = known(eqn.primitive)
    return not (eqn.effects or one.fence or one.opened == "remat")


def is_cast(item: object) -> TypeGuard[core.JaxprEqn]:
    """Whether it is an equation that only changes a dtype."""
    return isinstance(item, core.JaxprEqn) and known(item.primitive).seen == "casts"
