"""The layers of a model, found by how it is written, never by position.

A stack (``nn.scan``, ``lax.scan`` over parameters) is a loop whose body is one layer. Layers of a Python loop are modules
with a number that hold several modules with contractions: ``block_0``, ``block_1`` in linen, ``blocks/0``, ``blocks/1`` in
nnx; of nested ones the outermost. What else counts as a layer, a person says by patterns of module paths:
``"stage_*/block_*"``.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of, made_by, reads_of
from jscaler.ir.walk import between
from jscaler.plans.attention import Ops, holds_contraction
from jscaler.primitives import Planner

Modules = tuple[str, ...]
NUMBERED = re.compile(r"(?P<name>.*?)_?(?P<number>\d+)")


@dataclass(frozen=True)
class Series:
    """Layers that follow each other.

    Attributes:
        name: the loop, or the path of the modules without their number.
        layers: the ops of each, in the order of their numbers.
    """

    name: str
    layers: tuple[Ops, ...]
    is_loop: bool = False


def find_layers(graph: Planner, on: str | Sequence[str] | None = None, every: int = 1) -> tuple[Ops, ...]:
    """The ops of every layer, or of every ``every`` layers in a row.

    Args:
        on: shell patterns of module paths, each of whose modules is a layer; by default stacks, and modules with numbers.

    Raises:
        UnknownNameError: no module matches.
        PlanError: nothing looks like layers; or several layers in a row are asked for, and they are a loop.
    """
    if every < 1:
        raise PlanError(f"every is {every}: one layer or more in a row")
    ops = [op for op in graph.ops if op.kind == "forward"]
    patterns = [on] if isinstance(on, str) else on
    found = _found(graph, ops) if patterns is None else _matching(ops, patterns)
    taken = {op for series in found for layer in series.layers for op in layer}
    groups: list[Ops] = []
    for series in found:
        if series.is_loop and every > 1:
            raise PlanError(
                f"the layers of loop '{series.name}' are one body, run {graph.loops[series.name].length} times, that keeps "
                "its carry: every=1; to keep fewer, scan over groups of layers, or write layers as a Python loop"
            )
        rows = [series.layers[i : i + every] for i in range(0, len(series.layers), every)]
        groups += [_closed(graph, [op for layer in row for op in layer], taken) for row in rows]
    return tuple(groups)


def _matching(ops: Sequence[Op], patterns: Sequence[str]) -> list[Series]:
    groups: dict[tuple[int | None, str | None], dict[str, list[Op]]] = {}
    for op in ops:
        for path in modules_of(op.path):
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                groups.setdefault((op.call, op.loop), {}).setdefault(path, []).append(op)
                break
    if not groups:
        modules = sorted({module for op in ops for module in modules_of(op.path)})
        raise UnknownNameError("module", " or ".join(patterns), modules, "; layers are those of on=")
    return [
        Series(loop or "", tuple(map(tuple, layers.values())), loop is not None) for (_, loop), layers in groups.items()
    ]


def modules_of(path: str) -> list[str]:
    """The modules that hold an op, the outermost first: of ``a/b/dot`` ``a`` and ``a/b``."""
    return [path[:end] for end, letter in enumerate(path) if letter == "/"]


def _found(graph: Planner, ops: Sequence[Op]) -> list[Series]:
    stacks = stacks_of(graph)
    loops: dict[str, list[Op]] = {}
    modules: dict[tuple[int | None, Modules], dict[int, list[Op]]] = {}
    for op in ops:
        around = chain_of(op.loop, graph.loops)
        place = _numbered(op.path)
        if around and around[0] in stacks:
            loops.setdefault(around[0], []).append(op)
        elif place is not None:
            modules.setdefault((op.call, place[0]), {}).setdefault(place[1], []).append(op)
    heavy = {key for key, layers in modules.items() if any(_holds_modules(layer, len(key[1])) for layer in layers.values())}
    for key in modules.keys() - heavy:  # nnx's keys of dropout lie elsewhere than the parameters of the same modules
        for other in heavy:
            if key[0] == other[0] and key[1][1:] == other[1][1:] != ():
                for number, layer in modules[key].items():
                    modules[other].setdefault(number, []).extend(layer)
    found = [Series(name, (tuple(members),), True) for name, members in loops.items()]
    for key, layers in modules.items():
        if key in heavy:
            found.append(Series("/".join(key[1]), tuple(tuple(layers[number]) for number in sorted(layers))))
    if not found:
        raise PlanError(
            "the model has no stack of layers (nn.scan), nor modules with numbers (block_0, block_1) that hold several "
            "modules with contractions; say which modules are layers: on='encoder/*'"
        )
    return found


def stacks_of(graph: Planner, given: Iterable[PTensor] = ()) -> set[str]:
    """The outermost loops that take parameters apart; ``given`` are some that no gradient is taken of."""
    made = of_parameters(graph, given)
    return {n for n, loop in graph.loops.items() if loop.parent is None and any(x.stack in made for x in loop.xs)}


def of_parameters(graph: Planner, given: Iterable[PTensor] = ()) -> set[PTensor]:
    """Parameters, and what is made of them alone before a gradient is taken; of an evaluation the state that it follows."""
    made = {t for t, kind in tensor_kinds(graph.graph).items() if kind == "parameter"} | set(given)
    made.update(t for t in graph.inputs if not graph.calls and t.name in graph.stored)
    for op in graph.ops:
        large = [t for t in op.inputs if t.shape]
        if op.kind != "backward" and large and all(t in made for t in large):
            made.update(op.outputs)  # a cast, in the loss or before it
    return made


def _numbered(path: str) -> tuple[Modules, int] | None:
    """The outermost module with a number: its path without the number, and the number."""
    parts = path.split("/")[:-1]
    for i, part in enumerate(parts):
        match = NUMBERED.fullmatch(part)
        if match:
            return (*parts[:i], match["name"]), int(match["number"])
    return None


def _holds_modules(layer: Sequence[Op], depth: int) -> bool:
    """Whether several modules below ``depth`` modules hold contractions."""
    paths = (op.path.split("/")[:-1] for op in layer if holds_contraction(op))
    return len({parts[depth] for parts in paths if len(parts) > depth}) > 1


def _closed(graph: Planner, members: Sequence[Op], taken: set[Op]) -> Ops:
    """``members``, and what stands between them and has no layer of its own (nnx sets no scopes).

    What only they read joins them where no gradient flows through it (keys, masks), or where it has no module and makes
    no less than it reads (the statistics of a norm).
    """
    order = [op for op in graph.ops if op.kind == "forward" and op.call == members[0].call]
    own = set(members)
    loose = {op for op in order if op not in taken}
    own |= loose.intersection(between(order, own, reads_of, made_by))
    for op in reversed(order):
        if op in loose and op not in own and op.loop == members[0].loop and _prepares(graph, op, own):
            own.add(op)
    return tuple(op for op in order if op in own)


def _prepares(graph: Planner, op: Op, own: set[Op]) -> bool:
    readers = [reader for t in op.outputs for reader in graph.consumers.get(t, ()) if reader.kind == "forward"]
    if not readers or any(reader not in own for reader in readers):
        return False
    return op.backward is None or ("/" not in op.path and _nbytes(op.inputs) <= _nbytes(op.outputs))


def _nbytes(tensors: Iterable[PTensor]) -> int:
    return sum(t.nbytes for t in tensors)
