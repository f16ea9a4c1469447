"""``Piece``: a run of a block's items between which nothing is sent, as a program of one device that can be run by itself.

A loop in which nothing is sent is part of the piece around it. Of others each iteration has its pieces::

    items   a b all_reduce c loop(d e) loop(f all_gather g) h
    pieces  a b            c loop(d e)      f            g   h        f and g as often as the loop runs
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, shape_struct
from jscaler.estimate.works import computed
from jscaler.ir import Op
from jscaler.lower.emit import run_items
from jscaler.lower.flat_program import Exchange, FlatLoop, Item, all_items, reads, results
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan
from jscaler.xla_model.work import done_here

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of functions in parameters, another in each process


@dataclass(frozen=True, eq=False)
class Piece:
    """A program of one device.

    Attributes:
        run: takes ``inputs`` and returns the results.
        inputs: shapes and types.
        items: of the flat program; of an op's local body none.
        reads, leaves: the variables that the inputs and the results are.
        times: how often it runs in a run of its block.
        about: for people: the ops that it has results of.
    """

    run: Callable[..., list[Any]]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    items: tuple[Item, ...]
    reads: tuple[core.Var, ...]
    leaves: tuple[core.Var, ...]
    times: int
    about: str

    @cached_property
    def program(self) -> core.ClosedJaxpr:
        return jax.make_jaxpr(self.run)(*self.inputs)

    @cached_property
    def key(self) -> str:
        """The same for programs that are equal but for names, of equal shapes and types."""
        maps = [str(eqn.params["grid_mapping"]) for eqn in _every(self.program.jaxpr) if "grid_mapping" in eqn.params]
        text = _ADDRESS.sub("0x", "\n".join([str(self.program), *maps]))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def runs_alone(self) -> bool:
        """Whether it may be run on numbers of anybody's: it has no effect, and no loop whose length depends on them."""
        return not self.program.effects and not any(eqn.primitive.name == "while" for eqn in _every(self.program.jaxpr))


def _every(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a program, and of the programs in them but for kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if "grid_mapping" not in eqn.params:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from _every(getattr(inner, "jaxpr", inner))


def pieces_of(block: PlacedBlock) -> list[Piece]:
    """The pieces of a block, in order."""
    flat = block.flat
    found = list(_runs(flat.items, 1))
    readers: dict[core.Var, set[int]] = {}
    for number, (items, _) in enumerate(found):
        for item in items:
            for var in reads(item):
                readers.setdefault(var, set()).add(number)
    outside = {v for v in flat.outputs if isinstance(v, core.Var)}
    for item in all_items(flat.items):
        if isinstance(item, Exchange):
            outside.update(reads(item))
        elif isinstance(item, FlatLoop):
            outside.update(v for v in item.returned if isinstance(v, core.Var))
            outside.update(reads(item))
    return [
        _piece(block, items, times, lambda var, number=number: var in outside or bool(readers.get(var, set()) - {number}))
        for number, (items, times) in enumerate(found)
    ]


def _runs(items: Iterable[Item], times: int) -> Iterator[tuple[tuple[Item, ...], int]]:
    run: list[Item] = []
    for item in items:
        inner = isinstance(item, FlatLoop) and any(isinstance(one, Exchange) for one in all_items(item.items))
        if not inner and not isinstance(item, Exchange):
            run.append(item)
            continue
        if run:
            yield tuple(run), times
        run = []
        if isinstance(item, FlatLoop):
            yield from _runs(item.items, times * item.loop.length)
    if run:
        yield tuple(run), times


def _piece(block: PlacedBlock, items: tuple[Item, ...], times: int, is_read: Callable[[core.Var], bool]) -> Piece:
    made = {v for item in items for v in results(item)}
    taken = tuple(dict.fromkeys(v for item in items for v in reads(item) if v not in made))
    left = tuple(v for item in items for v in results(item) if is_read(v))

    def run(*args: Any) -> list[Any]:
        return run_items(block, items, dict(zip(taken, args, strict=True)), left)

    of = block.flat.origins.op
    ops = list(dict.fromkeys(of[v] for item in all_items(items) for v in results(item) if v in of))
    about = ops[0] + (f" … {ops[-1]}" if len(ops) > 1 else "") if ops else "what belongs to no op"
    return Piece(run, tuple(shape_struct(v.aval) for v in taken), items, taken, left, times, about)


def op_pieces(step: StepPlan) -> Iterator[tuple[Op, Piece]]:
    """Each op of each device group by itself."""
    for segment, task, times in computed(step):
        body = done_here(task.jaxpr, segment.flat.origins.done.get(task.op.path))
        if body.eqns:
            yield task.op, _of_body(body, times, task.op.path)


def _of_body(body: core.Jaxpr, times: int, about: str) -> Piece:
    def run(*args: Any) -> list[Any]:
        return evaluate(body, list(args))

    left = tuple(v for v in body.outvars if isinstance(v, core.Var))
    return Piece(run, tuple(shape_struct(v.aval) for v in body.invars), (), tuple(body.invars), left, times, about)
