"""``Analysis``: a fragment whose dims are unified, equation by equation, into the atoms that its factors are made of."""

from collections.abc import Iterable, Sequence

from jax.extend import core

from jscaler.capture.jaxprs import Atom, shape
from jscaler.capture.user_op import call_spec
from jscaler.errors import UnknownPrimitiveWarning, warn
from jscaler.lax_primitives import Dims, Spec, known
from jscaler.lax_primitives.spec import seen_whole
from jscaler.rules.analysed import Analysis, is_zero, zero_results
from jscaler.rules.dim_atoms import Atoms
from jscaler.rules.fold import fold_pads
from jscaler.rules.nested import NestDims, TensorDims, unify
from jscaler.rules.shardy import shardy_spec
from jscaler.rules.user_rules import shown_name


def analyse(jaxpr: core.Jaxpr, warned: set[str] | None = None) -> Analysis:
    """Unify the dims of an inlined fragment; ``warned`` holds the primitives that a warning has named already."""
    atoms = Atoms()
    given = [fresh_dims(atoms, shape(v)) for v in jaxpr.invars]
    return _analyse(jaxpr, atoms, given, frozenset(), set() if warned is None else warned)


def fresh_dims(atoms: Atoms, sizes: Sequence[int]) -> TensorDims:
    """A new atom for each dim that is longer than 1."""
    return tuple([] if size == 1 else [atoms.new(size)] for size in sizes)


def _analyse(
    jaxpr: core.Jaxpr, atoms: Atoms, given: Sequence[TensorDims], zero: Iterable[core.Var], warned: set[str]
) -> Analysis:
    """Analyse a program, possibly inside another; ``given`` are the dims of its inputs, some of which are ``zero``."""
    jaxpr = fold_pads(jaxpr)
    dims = dict(zip(jaxpr.invars, given, strict=True))
    specs: list[Spec] = []
    reduced: list[tuple[int, ...]] = []
    inner: dict[int, tuple[Analysis, ...]] = {}
    zeros = set(zero)

    def dims_of(atom: Atom) -> TensorDims:
        return dims[atom] if isinstance(atom, core.Var) else _constant(atoms, shape(atom))

    def inside(program: core.Jaxpr, own: Sequence[TensorDims], flags: Sequence[bool]) -> Analysis:
        known = [v for v, flag in zip(program.invars, flags, strict=True) if flag]
        return _analyse(program, atoms, own, known, warned)

    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            dims[var] = fresh_dims(atoms, shape(var))
        operands, results = [dims_of(v) for v in eqn.invars], [dims[v] for v in eqn.outvars]
        if known(eqn.primitive).nested:
            flags = [is_zero(v, zeros) for v in eqn.invars]
            nest = NestDims(atoms, operands, results, flags, inside, lambda sizes: _constant(atoms, sizes))
            inner[id(eqn)] = unify(eqn, nest)
            specs.append(Spec((), ()))
            reduced.append(())
            continue
        spec = spec_of(eqn, warned)
        specs.append(spec)
        labels: dict[object, int] = {}
        for mine, tensor in zip((*operands, *results), (*spec.operands, *spec.results), strict=True):
            _unify_tensor(atoms, mine, tensor, labels, eqn.primitive.name)
        for label, reason in spec.blocked.items():
            if label in labels:
                atoms.block([labels[label]], f"at {shown_name(eqn)} {reason}")
        kept = {label for tensor in spec.results for dim in tensor for label in dim}
        reduced.append(tuple(atom for label, atom in labels.items() if label not in kept))
        zeros.update(zero_results(eqn, zeros))
    return Analysis(jaxpr, tuple(specs), atoms, dims, frozenset(zeros), tuple(reduced), inner)


def _constant(atoms: Atoms, sizes: Sequence[int]) -> TensorDims:
    """Fresh atoms for an array written into the program, which has no parts."""
    fresh = fresh_dims(atoms, sizes)
    for dim in fresh:
        atoms.block(dim, "it indexes an array constant")
    return fresh


def _unify_tensor(atoms: Atoms, mine: Sequence[list[int]], tensor: Dims, labels: dict[object, int], where: str) -> None:
    for dim, names in zip(mine, tensor, strict=True):
        if not dim or not names:
            continue
        for label in names:
            if label not in labels:
                labels[label] = atoms.new(label[1])
        atoms.unify(dim, [labels[n] for n in names], where)


def spec_of(eqn: core.JaxprEqn, warned: set[str]) -> Spec:
    """What an equation does with the dims of its operands and results."""
    name, of_shapes = eqn.primitive.name, known(eqn.primitive).spec
    if (spec := call_spec(eqn)) is not None:
        return spec
    if of_shapes is not None:
        return of_shapes(eqn)
    if (spec := shardy_spec(eqn)) is not None:
        return spec
    if name not in warned:
        warned.add(name)
        warn(
            f"jscaler knows no rule for the primitive '{name}': ops that hold it are replicated, never split",
            UnknownPrimitiveWarning,
        )
    return seen_whole(eqn, "there is no rule")
