"""One region of a time axis as a loop: what comes in is cut, its ops run at part shapes, what leaves is joined.

whole ──► cut by the part's number ──┐
what the parts share ────────────────┴──► ops ──┬──► summand ──► + ──► carry ──► the sum
                                                └──► part ──► stack ──► merged ──► the whole
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Body, Carry, Graph, Loop, Nest, Op, PTensor, Stacked, flat
from jscaler.ir.loop import Item
from jscaler.ir.mask import Combiner
from jscaler.rules.neutral import neutral
from jscaler.schedule.parts import Form, Own, Sliced, Summed
from jscaler.schedule.regions import Region, Regions, shifted
from jscaler.schedule.time_axes import TimeCut
from jscaler.schedule.wide import add_wide, cast, is_widened


class AxisWriter(Protocol):
    """What a region needs of the time axis that it is written for.

    Attributes:
        part_of: tensor -> what stands for it in the loop; filled here, like ``loops``, ``new_ops`` and ``wide``.
        handed_on: a result that a part hands to the next -> the state that it takes the place of.
    """

    graph: Graph
    axis: str
    cuts: Mapping[str, TimeCut]
    bodies: BodyTable
    regions: Regions
    alone: frozenset[str]
    sum_dtype: str | None
    handed_on: Mapping[PTensor, PTensor]
    part_of: dict[PTensor, PTensor]
    loops: dict[str, Loop]
    new_ops: dict[str, Op]
    wide: dict[PTensor, PTensor]

    def outside(self, tensor: PTensor, region: Region) -> bool: ...
    def in_step(self, tensor: PTensor, reader: Op) -> bool: ...


class TornApartError(Exception):
    """A loop runs part by part as a whole, and another that reads what is inside it does not."""

    def __init__(self, loop: str):
        self.loop = loop


class RegionWriter:
    """Writes one region as a loop."""

    def __init__(self, writer: AxisWriter, region: Region, place: str | None):
        self.writer = writer
        self.region = region
        self.place = place
        self.forms = writer.regions.forms
        self.name = f"{writer.axis}@{min(region.ops, key=writer.graph.position.__getitem__)}"
        self.parts = next(iter(writer.cuts.values())).parts
        self.made = dict.fromkeys(t for item in region.items for t in _all_made(item))
        self.cut: dict[tuple[PTensor, Sliced], PTensor] = {}
        self.levels: list[tuple[list[Item], str]] = [([], self.name)]  # of the loop's body, and of loops in it
        self.before: list[Item] = []
        self.after: list[Item] = []
        self.taken = {  # state that a part takes over: the input -> what an iteration finds
            state: PTensor(f"{tensor.name}@before", state.aval, state.role)
            for tensor, state in writer.handed_on.items()
            if tensor in self.made
        }
        self.index: PTensor | None = None
        self.xs: list[Stacked] = []
        self.like = next(flat(region.items))

    def run(self) -> list[Item]:
        writer = self.writer
        for tensor in self.made:
            writer.part_of[tensor] = self._part(tensor)
        body = self.levels[0][0]
        for item in self.region.items:
            body.append(self._item(item))
        carries, ys = [], []
        inside = {t: item.loop.name for item in self.region.items if isinstance(item, Nest) for t in item.tensors()}
        for tensor in self.made:
            if not writer.outside(tensor, self.region):
                continue
            if tensor in inside:
                raise TornApartError(inside[tensor])
            form = self.forms.get(tensor)
            if isinstance(form, Sliced):
                ys.append(self._merged(tensor, form))
            else:
                carries.append(self._carried(tensor, form))
        loop = Loop(self.name, self.parts, False, tuple(carries), tuple(self.xs), tuple(ys), self.place, time=writer.axis)
        writer.loops[self.name] = loop
        return [*self.before, Nest(loop, tuple(body)), *self.after]

    def _part(self, tensor: PTensor) -> PTensor:
        form = self.forms.get(tensor)
        aval = tensor.aval.update(shape=form.shape(tensor.shape)) if isinstance(form, Sliced) else tensor.aval
        return PTensor(f"{tensor.name}@{self.writer.axis}", aval, tensor.role)

    def _item(self, item: Item) -> Item:
        return self._op(item) if isinstance(item, Op) else self._nest(item)

    def _op(self, op: Op) -> Op:
        writer = self.writer
        part = writer.regions.parts.get(op.path)
        wanted = part.inputs if part is not None else (None,) * len(op.inputs)
        inputs = tuple(self._read(t, form, op) for t, form in zip(op.inputs, wanted, strict=True))
        table = dict(zip(op.inputs, inputs, strict=True))
        changes: dict[str, object] = {
            "inputs": inputs,
            "outputs": tuple(writer.part_of[t] for t in op.outputs),
            "loop": self.levels[-1][1],
            "cotangents": tuple((i, table.get(t, t)) for i, t in op.cotangents),
            "saved": tuple((table.get(t, t), stands) for t, stands in op.saved),
        }
        if part is not None and part.named is not None:
            changes["named"] = part.named
        if part is not None and part.body is not None:
            index = (self._index(),) if part.indexed else ()
            changes |= {"body": part.body, "inputs": (*inputs, *index)}
        made = with_fence_body(dataclasses.replace(op, **changes), writer.bodies)  # type: ignore[arg-type]
        writer.new_ops[op.path] = made
        return made

    def _nest(self, nest: Nest) -> Nest:
        loop, part_of = nest.loop, self.writer.part_of
        carries = tuple(
            dataclasses.replace(
                c,
                init=self._read(c.init, self.forms.get(c.inside), self.like),
                inside=part_of[c.inside],
                out=part_of.get(c.out, c.out),
                final=part_of[c.final],
            )
            for c in loop.carries
        )
        xs = tuple(
            dataclasses.replace(
                x, stack=self._read(x.stack, shifted(self.forms.get(x.slice), 1), self.like), slice=part_of[x.slice]
            )
            for x in loop.xs
        )
        around = self.levels[-1][1]
        self.levels.append(([], loop.name))
        for item in nest.items:
            made = self._item(item)
            self.levels[-1][0].append(made)
        items = tuple(self.levels.pop()[0])
        ys = tuple(dataclasses.replace(y, stack=part_of[y.stack], slice=part_of.get(y.slice, y.slice)) for y in loop.ys)
        new = dataclasses.replace(loop, carries=carries, xs=xs, ys=ys, parent=around)
        self.writer.loops[loop.name] = new
        return Nest(new, items)

    # -- into the loop

    def _read(self, tensor: PTensor, form: Form, reader: Op) -> PTensor:
        """What a part reads of ``tensor``: what the region makes, a piece that is cut off here, or the whole."""
        if tensor in self.taken and form is None:
            return self.taken[tensor]
        assert form is not None or reader.path not in self.writer.alone or tensor not in self.writer.handed_on.values(), (
            tensor
        )
        handed = isinstance(form, Sliced) and self.forms.get(tensor) == form and self.writer.in_step(tensor, reader)
        if tensor in self.made or handed:
            found = self.writer.part_of[tensor]
            if self.forms.get(tensor) == form or not isinstance(form, Sliced):
                return found
            return self._cut(tensor, found, form, reader)  # made whole by every part
        return self._cut(tensor, tensor, form, reader) if isinstance(form, Sliced) else tensor

    def _cut(self, tensor: PTensor, whole: PTensor, form: Sliced, reader: Op) -> PTensor:
        if (tensor, form) not in self.cut:
            aval = whole.aval.update(shape=form.shape(whole.shape), weak_type=False)
            names = [t for t, _ in self.cut]
            mark = f"#{names.count(tensor)}" if tensor in names else ""
            made = PTensor(f"{tensor.name}@{self.name}{mark}", aval, tensor.role)
            body = self.writer.bodies.traced(lambda x, i: [form.take(x, i)], [whole.aval, _index_aval()])
            kind = "backward" if reader.kind == "backward" else "forward"
            path = f"{tensor.name}@cut{mark}@{self.name}"
            items, place = self.levels[-1] if tensor in self.made else self.levels[0]
            items.append(Op(path, kind, (whole, self._index()), (made,), body, call=reader.call, loop=place))
            self.cut[tensor, form] = made
        return self.cut[tensor, form]

    def _index(self) -> PTensor:
        """The number of the part that an iteration runs."""
        if self.index is None:
            self.index = PTensor(f"{self.name}:index", _index_aval())
            stack = PTensor(f"{self.name}:indices", _index_aval(self.parts))
            count = self.parts
            body = self.writer.bodies.traced(lambda: [lax.iota(jnp.int32, count)], [])
            self.before.append(self._beside(f"{self.name}:count", (), stack, body))
            self.xs.append(Stacked(stack, self.index))
        return self.index

    # -- out of it

    def _merged(self, tensor: PTensor, form: Sliced) -> Stacked:
        part = self.writer.part_of[tensor]
        stack = PTensor(
            f"{tensor.name}@stack", part.aval.update(shape=(self.parts, *part.shape), weak_type=False), tensor.role
        )
        body = self.writer.bodies.traced(lambda x: [form.merge(x)], [stack.aval])
        self.after.append(self._beside(f"{tensor.name}@merge", (stack,), tensor, body))
        return Stacked(stack, part)

    def _carried(self, tensor: PTensor, form: Form) -> Carry:
        """What all parts add up to, or join to; of what is the same for all, the last."""
        bodies, part = self.writer.bodies, self.writer.part_of[tensor]
        if isinstance(form, Own):
            state = self.writer.handed_on[tensor]
            return Carry(state, self.taken[state], part, tensor)
        combiner = form.combiner if isinstance(form, Summed) else "add"
        added = form is not None and combiner == "add"
        final = self._summed_in(tensor) if added else tensor
        init, inside = (PTensor(f"{tensor.name}@{word}", final.aval, tensor.role) for word in ("start", "sofar"))
        self.before.append(self._beside(f"{tensor.name}@start", (), init, _start(bodies, final.aval, combiner)))
        if form is None:
            return Carry(init, inside, part, tensor)
        out = PTensor(f"{tensor.name}@more", final.aval, tensor.role)
        if final is not tensor:
            body = add_wide(bodies, final.aval, part.aval)
        else:
            body = bodies.join(tensor.aval, 2) if added else bodies.traced(JOIN[combiner], [tensor.aval] * 2)
        op = self._beside(f"{tensor.name}@more", (inside, part), out, body)
        self.levels[0][0].append(dataclasses.replace(op, loop=self.name, anywhere="sum" if added else ""))
        return Carry(init, inside, out, final, is_sum=added)

    def _summed_in(self, tensor: PTensor) -> PTensor:
        """What the parts of ``tensor`` add up to: itself, or its value in the dtype that the plan asks for."""
        asked = self.writer.sum_dtype
        if not is_widened(tensor, asked):
            return tensor
        wide = PTensor(f"{tensor.name}@sum", tensor.aval.update(dtype=jnp.dtype(asked), weak_type=False), tensor.role)
        body = cast(self.writer.bodies, wide.aval, tensor.dtype)
        self.after.append(self._beside(f"{tensor.name}@cast", (wide,), tensor, body))
        self.writer.wide[tensor] = wide
        return wide

    def _beside(self, path: str, inputs: tuple[PTensor, ...], output: PTensor, body: Body) -> Op:
        kind = "backward" if output.role == "gradient" else self.like.kind
        return Op(path, kind, inputs, (output,), body, call=self.like.call, loop=self.place)


JOIN = {"max": lambda a, b: [jnp.maximum(a, b)], "min": lambda a, b: [jnp.minimum(a, b)]}


def _start(bodies: BodyTable, aval: Any, combiner: Combiner) -> Body:
    """What nothing has been added to yet."""
    if combiner == "add":
        return bodies.fill(aval, 0)
    return bodies.traced(lambda: [jnp.broadcast_to(neutral(combiner, aval.dtype), aval.shape)], [])


def _index_aval(*shape: int) -> Any:
    return jax.typeof(np.zeros(shape, np.int32))


def _all_made(item: Item) -> Iterator[PTensor]:
    if isinstance(item, Op):
        yield from item.outputs
    else:
        yield from item.tensors()
        yield from item.loop.results
