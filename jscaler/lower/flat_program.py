"""``FlatProgram``: a program without slots, over variables that are assigned once.

    Program   slots of tensors    computes, adapters, halos, loops          what the plan implies
    flat      variables           equations, exchanges, loops of these      what XLA gets, when the passes are done

Passes over it (`jscaler.flat_passes`) look at one level at a time: the items of the program, or those of a loop's body.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend import core

from jscaler.capture.jaxprs import Atom, swapped
from jscaler.ir import Loop, PTensor
from jscaler.lower.members import Members
from jscaler.lower.program import Adapt, Extend


@dataclass(frozen=True)
class Exchange:
    """An adapter, or a halo exchange, from one variable to another."""

    adapt: Adapt | Extend
    input: Atom
    output: core.Var

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return getattr(self.input.aval.dtype, "itemsize", 8)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FlatLoop:
    """A loop's body; it may read variables of the program around it.

    Attributes:
        items: of an iteration, in order.
        carries: per carry its value before the first iteration, in an iteration, at its end, and after the last.
        xs: per stack that is read the stack, and a slice.
        ys: per stack that is written a slice, and the stack.
        sums: per stack that iterations add to, each to its slice: the stack before, what an iteration adds, and the stack
            after the last, in the same memory.
    """

    loop: Loop
    items: tuple["Item", ...]
    carries: tuple[tuple[Atom, core.Var, Atom, core.Var], ...]
    xs: tuple[tuple[Atom, core.Var], ...]
    ys: tuple[tuple[Atom, core.Var], ...]
    sums: tuple[tuple[Atom, Atom, core.Var], ...] = ()

    @property
    def inner(self) -> list[core.Var]:
        """What the loop defines for its body."""
        return [*(inside for _, inside, _, _ in self.carries), *(piece for _, piece in self.xs)]

    @property
    def outvars(self) -> list[core.Var]:
        return [
            *(final for *_, final in self.carries),
            *(stack for _, stack in self.ys),
            *(total for *_, total in self.sums),
        ]

    @property
    def returned(self) -> list[Atom]:
        """What an iteration leaves."""
        pieces = (*(piece for piece, _ in self.ys), *(piece for _, piece, _ in self.sums))
        return [*(out for _, _, out, _ in self.carries), *pieces]

    @property
    def whole(self) -> list[Atom]:
        """What it takes that is no stack for its iterations to read."""
        return [*(init for init, *_ in self.carries), *(init for init, *_ in self.sums)]

    @functools.cached_property
    def reads(self) -> tuple[core.Var, ...]:
        """The variables of the program around it."""
        inner = set(self.inner)
        found: list[Atom] = [*self.whole, *(stack for stack, _ in self.xs), *self.returned]
        for item in self.items:
            found += reads(item)
            inner |= set(results(item))
        return tuple(dict.fromkeys(v for v in found if isinstance(v, core.Var) and v not in inner))


Item = core.JaxprEqn | Exchange | FlatLoop


def reads(item: Item) -> Sequence[core.Var]:
    """The variables that an item reads; of a loop, all that its body reads of the program around it."""
    if isinstance(item, core.JaxprEqn):
        return [a for a in item.invars if isinstance(a, core.Var)]
    if isinstance(item, FlatLoop):
        return item.reads
    return [item.input] if isinstance(item.input, core.Var) else []


def renamed(item: Item, read: Mapping[core.Var, Atom], made: Mapping[core.Var, core.Var] = {}) -> Item:
    """``item``, which reads other atoms, and defines other variables; so do those in a loop."""

    def new(atom: Atom) -> Atom:
        return swapped(read, atom)

    def own(var: core.Var) -> core.Var:
        return made.get(var, var)

    if isinstance(item, Exchange):
        return dataclasses.replace(item, input=new(item.input), output=own(item.output))
    if isinstance(item, core.JaxprEqn):
        return item.replace(invars=list(map(new, item.invars)), outvars=list(map(own, item.outvars)))
    return dataclasses.replace(
        item,
        items=tuple(renamed(inner, read, made) for inner in item.items),
        carries=tuple((new(init), own(inside), new(out), own(final)) for init, inside, out, final in item.carries),
        xs=tuple((new(stack), own(piece)) for stack, piece in item.xs),
        ys=tuple((new(piece), own(stack)) for piece, stack in item.ys),
        sums=tuple((new(init), new(piece), own(total)) for init, piece, total in item.sums),
    )


def results(item: Item) -> Sequence[core.Var]:
    """What an item defines."""
    return [item.output] if isinstance(item, Exchange) else item.outvars


def has_effects(item: Item) -> bool:
    """Whether an item does more than to define its results."""
    if isinstance(item, FlatLoop):
        return any(map(has_effects, item.items))
    return isinstance(item, core.JaxprEqn) and bool(item.effects)


@dataclass(frozen=True)
class Origins:
    """Where the values of a flat program come from.

    Attributes:
        op: a variable -> the path of the op that made it; of merged ones the first.
        tensor: a variable -> the (first) tensor of the graph that it is a part of.
        done: the path of an op -> which equations of its local body were not done before.
    """

    op: Mapping[core.Var, str] = field(default_factory=dict)
    tensor: Mapping[core.Var, PTensor] = field(default_factory=dict)
    done: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlatProgram:
    """What every device of a group runs.

    Attributes:
        part_indices: the variables that hold this device's number among the members that hold a thing's parts.
        source: any jaxpr of the step, whose debug info is carried on.
        held: by the results of an item the most bytes that a device holds while it runs, if a pass has estimated it.
    """

    inputs: tuple[core.Var, ...]
    part_indices: tuple[tuple[Members, core.Var], ...]
    items: tuple[Item, ...]
    outputs: tuple[Atom, ...]
    source: core.Jaxpr = field(compare=False, repr=False)
    origins: Origins = field(default_factory=Origins, compare=False, repr=False)
    held: Mapping[core.Var, int] | None = field(default=None, compare=False, repr=False)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges in order, those in loops once."""
        return tuple(item for item in all_items(self.items) if isinstance(item, Exchange))

    @property
    def equations(self) -> tuple[core.JaxprEqn, ...]:
        """All equations in order, those in loops once."""
        return tuple(item for item in all_items(self.items) if isinstance(item, core.JaxprEqn))

    def __str__(self) -> str:
        """One item a line: what it makes, what it reads, and the op or the tensor whose it is; those of loops indented.

        v3 f32[8,32]  dot_general v0 v1  layer_0/dot
        v4 f32[8,32]  all_reduce(x0) v3  layer_0/dot:0
        """
        return _text(self)


def all_items(items: Iterable[Item]) -> Iterator[Item]:
    """``items``, and those of the loops among them behind their loop."""
    for item in items:
        yield item
        if isinstance(item, FlatLoop):
            yield from all_items(item.items)


def numbered_exchanges(items: Sequence[Item], prefix: str = "") -> Iterator[tuple[str, Exchange]]:
    """The exchanges of items and of the loops among them, and the number of each: ``3``, or ``3.2`` in a loop."""
    for number, item in enumerate(items):
        if isinstance(item, Exchange):
            yield f"{prefix}{number}", item
        elif isinstance(item, FlatLoop):
            yield from numbered_exchanges(item.items, f"{prefix}{number}.")


@dataclass(frozen=True)
class Level:
    """The items of a program, or of one loop's body.

    Attributes:
        outputs: what is read behind them.
        given: what the program takes, or the loop carries.
        in_time: whether they are one part of many, so that this part's temporaries are what counts.
    """

    items: Sequence[Item]
    outputs: Sequence[Atom]
    given: Sequence[core.Var]
    in_time: bool = False


def each_level(program: FlatProgram, rewritten: Callable[[Level], Sequence[Item]]) -> FlatProgram:
    """``program`` with the items of every level as ``rewritten`` has them, inner loops first."""

    def of(level: Level) -> tuple[Item, ...]:
        inside = [_inside(item) if isinstance(item, FlatLoop) else item for item in level.items]
        return tuple(rewritten(dataclasses.replace(level, items=inside)))

    def _inside(loop: FlatLoop) -> FlatLoop:
        carried = [inside for _, inside, _, _ in loop.carries]
        return dataclasses.replace(loop, items=of(Level(loop.items, loop.returned, carried, bool(loop.loop.time))))

    return dataclasses.replace(program, items=of(Level(program.items, program.outputs, program.inputs)))


def _text(program: FlatProgram) -> str:
    """All items of ``program`` in order, those of loops indented."""
    names: dict[core.Var, str] = {}
    for var in (*program.inputs, *(v for _, v in program.part_indices)):
        names[var] = f"v{len(names)}"
    head = [f"inputs {_listed(program.inputs, names)}"]
    head += [f"{names[var]} this device's index along {who}" for who, var in program.part_indices]
    return "\n".join([*head, *_lines(program.items, names, program, ""), f"results {_listed(program.outputs, names)}"])


def _lines(items: Iterable[Item], names: dict[core.Var, str], program: FlatProgram, indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, FlatLoop):
            for var in item.inner:
                names.setdefault(var, f"v{len(names)}")
        read = _listed(item.invars if isinstance(item, core.JaxprEqn) else reads(item), names)
        for var in results(item):
            names[var] = f"v{len(names)}"
        made = ", ".join(f"{names[v]} {v.aval.str_short(short_dtypes=True)}" for v in results(item))
        yield f"{indent}{made}  {_what(item)} {read}  {_whose(item, program)}".rstrip()
        if isinstance(item, FlatLoop):
            yield from _lines(item.items, names, program, indent + "  ")


def _what(item: Item) -> str:
    if isinstance(item, FlatLoop):
        return f"loop of {item.loop.length} '{item.loop.name}'"
    if isinstance(item, Exchange):
        return str(item.adapt.adapter) if isinstance(item.adapt, Adapt) else "halo"
    return item.primitive.name


def _whose(item: Item, program: FlatProgram) -> str:
    """The op that made it, or the tensor that is on its way."""
    if isinstance(item, Exchange):
        return item.adapt.tensor.name
    return next((program.origins.op[v] for v in results(item) if v in program.origins.op), "")


def _listed(atoms: Sequence[Atom], names: dict[core.Var, str]) -> str:
    return " ".join(str(a.val) if isinstance(a, core.Literal) else names.get(a, "?") for a in atoms)
