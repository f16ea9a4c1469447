"""A step that takes the state of another: its state lies as the train step's plan says, and nothing of it is moved.

An evaluation between train steps reads the very arrays that the train step returned. So their layouts are given to its
plan as decisions (`jscaler.primitives.Store`), before anything else is completed.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jscaler.clusters import CostModel
from jscaler.errors import CaptureError, JscalerError, PlanWarning, UnknownNameError, warn
from jscaler.ir import Graph, PTensor
from jscaler.materialize import Layout
from jscaler.materialize.stored import store_of
from jscaler.primitives import Decision, LeafParts, Plan
from jscaler.runtime.arguments import BoundCall
from jscaler.stages import Captured, transform


@dataclass(frozen=True)
class Followed:
    """The state of a train step that was planned: for each of its leaves the tensor and its layout.

    Attributes:
        leaves: of a leaf that lies in ranges of its dim 0 several.
        copied: leaves of which these are copies on several device groups.
        owners: the arguments of the step that it updates.
    """

    leaves: Mapping[str, tuple[tuple[PTensor, Layout], ...]]
    owners: tuple[str, ...]
    copied: Set[str] = frozenset()

    @staticmethod
    def of(graph: Graph, inputs: Mapping[PTensor, Layout], call: BoundCall) -> "Followed":
        each = iter(graph.inputs)
        counts = graph.leaf_parts or (1,) * len(call.names)
        leaves = {name: tuple(itertools.islice(each, count)) for name, count in zip(call.names, counts, strict=True)}
        state = {graph.inputs[i] for i in graph.next_version.values()}
        updated = dict.fromkeys(o for o, own in zip(call.owners, leaves.values(), strict=True) if not state.isdisjoint(own))
        copied = frozenset(name for name, own in leaves.items() if not graph.copy_of.keys().isdisjoint(own))
        return Followed({name: tuple((t, inputs[t]) for t in own) for name, own in leaves.items()}, tuple(updated), copied)


@dataclass(frozen=True)
class Following:
    """Which leaves of a step's calls lie as those of another step.

    Attributes:
        name: the other step's.
        policy: the other step's; None where it is for that step alone.
        planned: what the other step has been planned for so far, the latest last.
        paths: argument of this step -> path of the other's leaves that it is; by default the state's own names.
    """

    name: str
    policy: Any
    planned: Callable[[], Iterable[Followed]]
    paths: Mapping[str, str] = field(default_factory=dict)

    def plan(self, captured: Captured, policy: Any, call: BoundCall, num_devices: int, step: str, cost: CostModel) -> Plan:
        """The plan of ``step`` by its own ``policy``, or by the other's where that fits; the state's layouts are in it."""
        stores = self.stores(call)
        if policy is None:
            return self._alike(captured, stores, num_devices, step, cost)
        return transform(captured, policy, num_devices, stores, cost)

    def _alike(self, captured: Captured, stores: Sequence[Decision], num_devices: int, step: str, cost: CostModel) -> Plan:
        """The other step's policy on this step; an open plan, with a warning, where it does not fit."""
        left_open = Plan(f"filled in for {step}", num_devices, tuple(stores))
        if self.policy is None or isinstance(self.policy, Plan):
            return left_open  # a finished plan names the ops of its own graph
        try:
            return transform(captured, self.policy, num_devices, stores, cost)
        except JscalerError as error:
            warn(
                f"the policy of '{self.name}' does not fit '{step}', whose plan is filled in from the layout of the state; "
                f"give it one of its own with follow(..., plan=). {type(error).__name__}: {error}",
                PlanWarning,
            )
            return left_open

    def stores(self, call: BoundCall) -> list[Decision]:
        """The decisions that store the state leaves of ``call``.

        Raises:
            CaptureError: the other step has not been planned, or for another state, or has no state that is known here.
            UnknownNameError: ``paths`` names an argument or a path that does not exist.
        """
        candidates = list(self.planned())[::-1]
        if not candidates:
            raise CaptureError(
                f"'{self.name}' has no plan yet that its state could be followed by: make the state with {self.name}.init, "
                f"or call (or lower) {self.name} first"
            )
        found, differences = self._stores(call, candidates[0])
        for candidate in candidates[1:]:
            if not differences:
                break
            other, others = self._stores(call, candidate)
            found, differences = (other, others) if not others else (found, differences)
        if differences:
            raise CaptureError(f"this is not the state of '{self.name}': {differences[0]}")
        return found

    def _stores(self, call: BoundCall, followed: Followed) -> tuple[list[Decision], list[str]]:
        """The decisions, and what tells the leaves from those that are followed."""
        arguments = list(dict.fromkeys(call.owners))
        paths = dict(self.paths) or {name: name for name in followed.owners if name in arguments}
        for name in paths:
            if name not in arguments:
                raise UnknownNameError("argument", name, arguments, " (of the step that follows)")
        if not paths:
            raise CaptureError(
                f"none of the arguments {', '.join(arguments)} is called as the state of '{self.name}' is "
                f"({', '.join(followed.owners) or 'it updates none'}): say which is what, as in "
                "follow(eval_step, paths={'params': 'state/params'})"
            )
        found, differences, matched = list[Decision](), list[str](), set[str]()
        in_parts: dict[tuple[int, ...], list[str]] = {}
        for name, kind, owner in zip(call.names, call.types, call.owners, strict=True):
            if owner not in paths:
                continue
            there = paths[owner] + name.removeprefix(owner)
            if there not in followed.leaves:
                continue  # not the train step's: it is laid out like any other input
            matched.add(owner)
            parts, elsewhere = followed.leaves[there], list[Layout]()
            if there in followed.copied:
                parts, elsewhere = parts[:1], [layout for _, layout in parts[1:]]
            (tensor, _), sizes = parts[0], tuple(t.shape[0] for t, _ in parts if t.shape)
            shape = tensor.shape if len(parts) == 1 else (sum(sizes), *tensor.shape[1:])
            if (shape, tensor.dtype) != (kind.shape, kind.dtype):
                differences.append(f"'{name}' is {kind}, and '{there}' is {tensor.dtype}{list(shape)}")
                continue
            if len(parts) > 1:
                in_parts.setdefault(sizes, []).append(name)
            found += [store_of(name + part.name.removeprefix(there), layout, elsewhere) for part, layout in parts]
        for owner in paths:
            if owner not in matched:
                raise UnknownNameError("state", paths[owner], followed.leaves, f" (of '{self.name}')")
        return [*(LeafParts(tuple(names), sizes) for sizes, names in in_parts.items()), *found], differences
