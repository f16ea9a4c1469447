"""What Shardy, the partitioner inside XLA, knows of a primitive that the table lacks.

The equation is lowered by itself, Shardy names the factors of each StableHLO op, and a union-find joins them. Only
factors that pass through every op are taken: reductions, permutations and whatever slides or looks up are blocked. Each
is then checked on a part: the primitive must give the part's shape, and lower to the same ops and constants.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

from jscaler.capture.jaxprs import evaluate, make_jaxpr, open_jaxpr, shape, shape_struct
from jscaler.lax_primitives import Dims, Label, Spec, known
from jscaler.rules.dim_atoms import Atoms

WHY = "there is no rule, and no factor of Shardy's that passes through"
# Of these, dims of operands and results that share a factor are one index, element by element.
TRUSTED = frozenset(["broadcast_in_dim", "custom_call", "dot_general", "reduce", "reshape", "transpose"])
# Of equal shapes, and yet not element by element.
SLIDING = frozenset(
    ["case", "convolution", "dynamic_slice", "dynamic_update_slice", "gather", "if", "iota", "pad", "reduce_window", "rng",
     "rng_bit_generator", "scatter", "select_and_scatter", "slice", "sort", "while"]
)  # fmt: skip
MEET = "Shardy's factors meet"


def shardy_spec(eqn: core.JaxprEqn) -> Spec | None:
    """The spec of an equation by Shardy's factors; None where none of them can be split."""
    if eqn.effects or not known(eqn.primitive).asks_shardy:
        return None
    variables = [v for v in eqn.invars if isinstance(v, core.Var)]
    module = _lowered(eqn, [shape(v) for v in variables])
    if module is None:
        return None
    atoms = Atoms()
    operands, results = _dims(module, atoms)
    blocked: dict[Label, str] = {}

    def labels(dims: Sequence[list[int]]) -> Dims:
        found = tuple(tuple((leaf, atoms.size[leaf]) for leaf in atoms.leaves(dim)) for dim in dims)
        blocked.update({label: WHY for dim in found for label in dim if label[0] in atoms.reason})
        return found

    given = iter(map(labels, operands))
    tensors = tuple(next(given) if isinstance(v, core.Var) else ((),) * len(shape(v)) for v in eqn.invars)
    spec = Spec(tensors, tuple(map(labels, results)), blocked=blocked)
    shared = {label for t in spec.operands for d in t for label in d} & {n for t in spec.results for d in t for n in d}
    every = {label for t in (*spec.operands, *spec.results) for d in t for label in d}
    for label in every - set(blocked):
        if label not in shared or not _holds(eqn, spec, label, module):
            blocked[label] = WHY
    return spec if every - set(blocked) else None


def _lowered(eqn: core.JaxprEqn, sizes: Sequence[tuple[int, ...]]) -> ir.Module | None:
    """The StableHLO of one equation on operands of ``sizes``; None where it cannot be lowered by itself."""
    variables = [v for v in eqn.invars if isinstance(v, core.Var)]
    empty, _ = open_jaxpr(jax.make_jaxpr(lambda: ())())
    one = make_jaxpr([eqn], variables, eqn.outvars, empty)
    structs = [jax.ShapeDtypeStruct(s, shape_struct(v.aval).dtype) for v, s in zip(variables, sizes, strict=True)]
    try:
        lowered = jax.jit(lambda *xs: evaluate(one, xs), keep_unused=True).lower(*structs)
    except Exception:  # a primitive may refuse in any way it likes: nothing is known of it, and the caller warns and copies
        return None
    return lowered.compiler_ir("stablehlo")


def _dims(module: ir.Module, atoms: Atoms) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """The dims, as atoms, of the arguments and of the results of a module's only function."""
    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
    block = _main(module)
    known: dict[Any, list[list[int]]] = {}

    def dims(value: Any) -> list[list[int]]:
        if value not in known:
            sizes = _sizes(value)
            known[value] = [[] if size == 1 else [atoms.new(size)] for size in sizes]
        return known[value]

    arguments = [dims(value) for value in block.arguments]
    for op in block.operations:
        operands, results = [dims(v) for v in op.operands], [dims(v) for v in op.results]
        if op.name == "func.return":
            return arguments, operands
        _join(op, operands, results, atoms)
    raise AssertionError("a function without a return")


def _join(op: Any, operands: list[list[list[int]]], results: list[list[list[int]]], atoms: Atoms) -> None:
    name = op.name.removeprefix("stablehlo.")
    if name == "constant" and not {*'["'} & {*_number(op)}:  # one number everywhere
        return
    alike = len({_sizes(v) for v in (*op.operands, *op.results)}) == 1
    if "sdy.sharding_rule" not in op.attributes or not (alike or name in TRUSTED) or name in SLIDING:
        for dim in (d for tensor in (*operands, *results) for d in tensor):
            atoms.block(dim, WHY)
        return
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
    factors = [atoms.new(size) for size in rule.factor_sizes]
    seen: tuple[set[int], set[int]] = (set(), set())
    for side, tensors, mappings in ((0, operands, rule.operand_mappings), (1, results, rule.result_mappings)):
        for tensor, mapping in zip(tensors, mappings, strict=True):
            for dim, each in zip(tensor, sdy.TensorMappingAttr(mapping).dim_mappings, strict=True):
                own = [f for f in sdy.DimMappingAttr(each).factor_indices if rule.factor_sizes[f] != 1]
                if math.prod(rule.factor_sizes[f] for f in own) != math.prod(atoms.size[a] for a in dim):
                    atoms.block([*dim, *(factors[f] for f in own)], WHY)
                    continue
                seen[side].update(own)
                atoms.unify(dim, [factors[f] for f in own], MEET)
    apart = seen[0] ^ seen[1] if name != "broadcast_in_dim" else seen[0] - seen[1]
    for f in {*rule.reduction_factors, *rule.need_replication_factors, *rule.permutation_factors, *apart}:
        atoms.block([factors[f]], WHY)


def _holds(eqn: core.JaxprEqn, spec: Spec, label: Label, whole: ir.Module) -> bool:
    """Whether the primitive, on a part, gives the part's shapes and lowers to the same ops and constants."""
    parts = next(n for n in range(2, label[1] + 1) if label[1] % n == 0)

    def local(sizes: tuple[int, ...], tensor: Dims) -> tuple[int, ...]:
        return tuple(size // (parts if label in dim else 1) for size, dim in zip(sizes, tensor, strict=True))

    pairs = zip(eqn.invars, spec.operands, strict=True)
    part = _lowered(eqn, [local(shape(v), tensor) for v, tensor in pairs if isinstance(v, core.Var)])
    if part is None or _words(part) != _words(whole):
        return False
    returned = [_sizes(v) for v in _operations(part)[-1].operands]
    return returned == [local(shape(v), tensor) for v, tensor in zip(eqn.outvars, spec.results, strict=True)]


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value.type, "shape", ()))


def _operations(module: ir.Module) -> list[Any]:
    return list(_main(module).operations)


def _main(module: ir.Module) -> Any:
    """The block of the function that stands for the equation; functions that it calls are not looked into."""
    named = [op for op in module.body.operations if str(op.operation.attributes["sym_name"]) == '"main"']
    return named[0].regions[0].blocks[0]


def _words(module: ir.Module) -> list[Any]:
    """The ops of a module, and the numbers written into it, without shapes."""
    return [(op.name, _number(op)) for op in _operations(module)]


def _number(op: Any) -> str:
    """What a constant holds, as text."""
    return str(op).partition("dense")[2].split(":")[0] if op.name == "stablehlo.constant" else ""
