"""Arguments that the step leaves as they are lie on every group that reads them: nothing is sent of them between groups.

::

    group 0    mask ──────► readers           mask@2-3 is an input of its own; for the step's caller the two are one
    group 1    mask@2-3 ──► readers           array, over the devices of both groups

A batch comes to all these groups when the step is called; a frozen parameter is made, or restored, on all of them, and
stays. An array lies alike on all of its devices. So what is no scalar is sent, as what the step changes is, to groups with
other axes, and to those that share devices with the first.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jscaler.ir import Graph, PTensor
from jscaler.ir.loop import chain_of
from jscaler.ir.name import group_mark
from jscaler.ir.walk import grouped
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.mesh import DeviceMesh


def inputs_where_read(at: OnGroups) -> OnGroups:
    """What several groups read, and the step does not change, is an input on each. What the plan stores lies as it says."""
    if len(at.groups.meshes) == 1:
        return at
    graph = at.graph
    chains = grouped((name, at.of_op[op.path]) for op in graph.ops for name in chain_of(op.loop, graph.loops))
    on_loop = {name: groups[0] for name, groups in chains.items() if len({*groups}) == 1}
    wide = {t for name, loop in graph.loops.items() if name not in on_loop for t in loop.operands}
    copies: dict[PTensor, dict[DeviceMesh, PTensor]] = {}
    for tensor in _unchanged(graph):
        groups = at.groups.stored.get(tensor.name)
        if groups is None and tensor not in wide:
            groups = _alike(tensor, (at.of_op[op.path] for op in graph.flow.readers(tensor)))
        if groups is not None and len(groups) > 1:
            names = {group: tensor.name + group_mark(group.devices) for group in groups[1:]}
            copies[tensor] = {groups[0]: tensor} | {g: dataclasses.replace(tensor, name=name) for g, name in names.items()}
    if not copies:
        return at
    here = {group: {t: own[group] for t, own in copies.items() if group in own} for group in at.groups.meshes}
    ops = tuple(op.renamed(here[at.of_op[op.path]]) for op in graph.ops)
    loops = {name: loop.renamed(here[on_loop[name]], {}) if name in on_loop else loop for name, loop in graph.loops.items()}
    made = _with_copies(dataclasses.replace(graph, ops=ops, loops=loops), {t: [*own.items()] for t, own in copies.items()})
    return dataclasses.replace(at, graph=made, lies={t: group for own in copies.values() for group, t in own.items()})


def _unchanged(graph: Graph) -> list[PTensor]:
    """The inputs that are whole leaves, and that the step does not change."""
    changed = {graph.inputs[i] for o, i in graph.next_version.items() if graph.outputs[o] != graph.inputs[i]}
    counts = [count for count in graph.leaf_parts for _ in range(count)] or [1] * len(graph.inputs)
    return [t for t, count in zip(graph.inputs, counts, strict=True) if count == 1 and t not in changed]


def _alike(tensor: PTensor, groups: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    """Those of ``groups`` on which one array can lie: the first, and others like it on devices of their own."""
    found: list[DeviceMesh] = []
    for group in dict.fromkeys(groups):
        fits = all(group.axes == other.axes and {*group.devices}.isdisjoint(other.devices) for other in found)
        found += [group] if fits or not tensor.shape else []
    return found


def _with_copies(graph: Graph, copies: Mapping[PTensor, Sequence[tuple[DeviceMesh, PTensor]]]) -> Graph:
    """``graph`` with inputs behind those that they are copies of; and outputs, where state is returned as it came."""
    inputs, outputs, names = list[PTensor](), list[PTensor](), list[str]()
    place: list[int] = []
    for tensor in graph.inputs:
        place.append(len(inputs))
        inputs += [copy for _, copy in copies.get(tensor, [(None, tensor)])]
    versions: dict[int, int] = {}
    made: list[int] = []
    for number, (tensor, name) in enumerate(zip(graph.outputs, graph.output_names, strict=True)):
        leaf = graph.next_version.get(number)
        (_, own), *others = copies[tensor] if leaf is not None and tensor in copies else [(None, tensor)]
        versions |= {} if leaf is None else {len(outputs) + i: place[leaf] + i for i in range(1 + len(others))}
        outputs += [own, *(copy for _, copy in others)]
        names += [name, *(name + group_mark(group.devices) for group, _ in others if group is not None)]
        made.append(1 + len(others))
    taken = [len(copies.get(tensor, (tensor,))) for tensor in graph.inputs]
    return dataclasses.replace(
        graph, inputs=tuple(inputs), outputs=tuple(outputs), output_names=tuple(names), next_version=versions,
        leaf_parts=_counts(graph.leaf_parts, taken), result_parts=_counts(graph.result_parts, made),
        copy_of={copy: tensor for tensor, own in copies.items() for _, copy in own[1:]},
    )  # fmt: skip


def _counts(before: Sequence[int], of_each: Sequence[int]) -> tuple[int, ...]:
    """How many each leaf is, which was so many as ``before`` says, of which each is so many now."""
    each = iter(of_each)
    return tuple(sum(next(each) for _ in range(count)) for count in before or (1,) * len(of_each))
