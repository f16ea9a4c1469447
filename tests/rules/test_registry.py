"""The table against Shardy, the partitioner inside XLA: where both open an index of a primitive, and where only one does.

Every equation that the cases of the other tests trace to is lowered, all into one module, and Shardy names the factors
of its StableHLO ops. An equation agrees if the same sub-dims are one index on both sides, and are reduced on both. What
differs is listed here with the reason; a difference that is not listed, or no longer there, fails.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
import test_convolution
import test_indexing
import test_nested
import test_others
import test_table
import test_window_parts
from jax.extend import core
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from of_the_day import SEED, of_the_day
from parts import fragment, primitives_in

from jscaler.capture.jaxprs import evaluate, inline, make_jaxpr, shape_struct, trace_flat
from jscaler.lax_primitives import TABLE
from jscaler.rules.dim_atoms import Atoms
from jscaler.verification.rules import verify_rules
from jscaler.verification.whole_against_parts import FragmentInParts

# (how, size, where): how is passes or reduced; where holds (operand or result, dim, rows of the dim below this sub-dim)
Index = tuple[str, int, frozenset[tuple[int, int, int]]]

RULED = {name for name, one in TABLE.items() if one.spec is not None}
NESTED = {name for name, one in TABLE.items() if one.nested}
# What the table opens and Shardy does not, and the other way round.
ONLY_TABLE = {
    "slice": "the place in equal blocks is an index",
    "split": "the place in equal blocks is an index",
    "concatenate": "the place in equal blocks is an index",
    "random_bits": "threefry's bits are a function of the global index",
    "dynamic_slice": "a part gives the rows of the window that it has: a reduction",
    "conv_general_dilated": "a part reads rows of its neighbours",
    "reduce_window_max": "a part reads rows of its neighbours",
    "reduce_window_min": "a part reads rows of its neighbours",
    "reduce_window_sum": "a part reads rows of its neighbours",
    "select_and_gather_add": "a part reads rows of its neighbours",
    "select_and_scatter_add": "a part reads rows of its neighbours",
}
ONLY_SHARDY = {
    "reduce_prod": "no combiner multiplies",
    "reduce_or": "on integers it works on bits, and no combiner does",
    "reduce_and": "on integers it works on bits, and no combiner does",
    "reduce_xor": "no combiner works on bits",
    "scatter-add": "the tensor that it is added to is added once, not once per part",
    "scatter-mul": "no combiner multiplies",
    "conv_general_dilated": "the window of a patch is no reduction: a part of it has another result's shape",
    "random_clone": "the words of a key stay together",
    "random_wrap": "the words of a key stay together",
    "random_unwrap": "the words of a key stay together",
}
if jax.__version_info__ >= (0, 11, 0):  # with a Shardy that opens less
    ONLY_TABLE["dynamic_update_slice"] = "a part writes the rows of the window that are its own"
    ONLY_TABLE["reshape"] = "what both sides have at the major end is an index, whatever is mixed below it"
else:
    ONLY_SHARDY["pad"] = "what pads one end and cuts the other moves rows from part to part"


def programs() -> Iterator[tuple[Callable[..., Any], Sequence[Any]]]:
    """The examples of all tests."""
    for name in test_table.ELEMENTWISE_HERE:
        yield test_table.elementwise_call(name)
    for name, several in test_table.CASES.items():
        yield from several if name in test_table.KNOWN else ()
    yield from others()


def others() -> Iterator[tuple[Callable[..., Any], Sequence[Any]]]:
    """The examples that test_table does not verify."""
    for fun, args, *_ in (*test_others.CASES.values(), *test_convolution.CASES.values(), *test_nested.CASES.values()):
        yield fun, args
    yield test_others.RAGGED
    for fun, rows in test_window_parts.POOLS.values():
        yield fun, (test_window_parts.real(2, rows, 3),)
    yield from (test_window_parts.TANGENTS, test_window_parts.GRADIENT)
    for table in (test_indexing.GATHERS, test_indexing.SLICES, test_indexing.SCATTERS):
        yield from table.values()
    for fun in test_others.CALLBACKS.values():
        yield fun, (np.ones((4, 6)),)
    for fun, rows, taps in test_window_parts.CONVS.values():
        yield fun, (test_window_parts.real(2, rows, 3), test_window_parts.real(taps, 3, 2))


def equations() -> list[core.Jaxpr]:
    """Every distinct equation of the table's primitives that the cases trace to, as a program of its own."""
    found: dict[str, core.Jaxpr] = {}
    for fun, args in programs():
        traced = trace_flat(lambda *xs, fun=fun: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args])
        for eqn in inline(traced).eqns:
            operands = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
            if eqn.primitive.name in RULED and not eqn.effects and operands:
                one = make_jaxpr([eqn], operands, eqn.outvars, traced)
                found.setdefault(str(one), one)
    return list(found.values())


def lowered(ones: Sequence[core.Jaxpr]) -> tuple[Any, dict[str, Any]]:
    """One module, and its functions by name, with Shardy's factors; ``equation_<i>`` is that of ``ones[i]``."""

    def function(number: int, one: core.Jaxpr) -> Any:
        def run(*xs: Any) -> list[Any]:
            return evaluate(one, xs)

        run.__name__ = f"equation_{number}"
        return jax.jit(run)

    functions = [function(i, one) for i, one in enumerate(ones)]
    structs = [[shape_struct(v.aval) for v in one.invars] for one in ones]
    every = jax.jit(lambda args: [f(*xs) for f, xs in zip(functions, args, strict=True)], keep_unused=True)
    module: Any = every.lower(structs).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
    named = {str(op.operation.attributes["sym_name"]).strip('"'): op.operation for op in module.body.operations}
    return module, {name: op for name, op in named.items() if op.name == "func.func"}


class Unknown(Exception):
    """Shardy has no rule for an op."""


@dataclass
class Reading:
    """What Shardy says of one equation: the dims of its StableHLO ops unified into atoms."""

    functions: dict[str, Any]
    atoms: Atoms = field(default_factory=Atoms)
    reduced: list[int] = field(default_factory=list)

    def call(self, name: str, operands: Sequence[Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Dims of a function's arguments and results."""
        block = self.functions[name].regions[0].blocks[0]
        given = operands or [self.fresh(v) for v in block.arguments]
        known: dict[Any, list[list[int]]] = dict(zip(block.arguments, given, strict=True))
        for op in block.operations:
            inputs = [known[v] for v in op.operands]
            if op.name == "func.return":
                return list(given), inputs
            if op.name == "func.call":
                results = self.call(str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value), inputs)[1]
            else:
                results = [self.fresh(v) for v in op.results]
                self.read(op, inputs, results)
            known.update(zip(op.results, results, strict=True))
        raise AssertionError("a function without a return")

    def fresh(self, value: Any) -> list[list[int]]:
        sizes = getattr(value.type, "shape", ())
        return [[] if size == 1 else [self.atoms.new(size)] for size in sizes]

    def read(self, op: Any, operands: list[Any], results: list[Any]) -> None:
        if op.name == "stablehlo.constant":
            return
        if "sdy.sharding_rule" not in op.attributes:
            raise Unknown(op.name)
        rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
        factors = [self.atoms.new(size) for size in rule.factor_sizes]
        mappings = [*rule.operand_mappings, *rule.result_mappings]
        for tensor, mapping in zip((*operands, *results), mappings, strict=True):
            for dim, each in zip(tensor, sdy.TensorMappingAttr(mapping).dim_mappings, strict=True):
                own = [factors[f] for f in sdy.DimMappingAttr(each).factor_indices if rule.factor_sizes[f] != 1]
                mine, total = ([self.atoms.size[a] for a in side] for side in (dim, own))
                if np.prod(mine) == np.prod(total):
                    self.atoms.unify(dim, own, op.name)
                else:
                    self.atoms.block([*dim, *own], op.name)
        self.reduced += [factors[f] for f in rule.reduction_factors]
        sides = [on_dims(rule.operand_mappings), on_dims(rule.result_mappings)]
        lost = sides[0] - sides[1] - {*rule.reduction_factors}  # of a reshape that mixes: on one side only
        made = sides[1] - sides[0] if op.name != "stablehlo.broadcast_in_dim" else set()
        for f in (*rule.need_replication_factors, *rule.permutation_factors, *lost, *made):
            self.atoms.block([factors[f]], op.name)

    def indices(self, name: str) -> set[Index]:
        operands, results = self.call(name)
        reduced = set(self.atoms.leaves(self.reduced))
        dims = [[self.atoms.leaves(dim) for dim in tensor] for tensor in (*operands, *results)]
        kinds = {leaf: "reduced" if leaf in reduced else "passes" for t in dims for d in t for leaf in d}
        open_ = {leaf: kind for leaf, kind in kinds.items() if leaf not in self.atoms.reason}
        return as_indices(dims, open_, self.atoms.size.__getitem__)


def on_dims(mappings: Any) -> set[int]:
    """The factors on any dim of some tensors."""
    dims = [each for mapping in mappings for each in sdy.TensorMappingAttr(mapping).dim_mappings]
    return {f for each in dims for f in sdy.DimMappingAttr(each).factor_indices}


def as_indices(dims: Sequence[Any], kinds: dict[Any, str], size: Callable[[Any], int]) -> set[Index]:
    where: dict[Any, set[tuple[int, int, int]]] = {}
    for t, tensor in enumerate(dims):
        for d, names in enumerate(tensor):
            below = 1
            for name in reversed(names):
                where.setdefault(name, set()).add((t, d, below))
                below *= size(name)
    return {(kind, size(name), frozenset(where[name])) for name, kind in kinds.items() if name in where}


def tables(one: core.Jaxpr) -> set[Index]:
    rule = FragmentInParts.of(one).rule
    kinds = {"parallel": "passes", "reduction": "reduced"}
    open_ = {f.name: kinds[f.kind] for f in rule.factors.values() if f.kind != "blocked"}
    return as_indices([*rule.operands, *rule.results], open_, lambda name: rule.factors[name].size)


@pytest.mark.smoke
def test_shardy_agrees_but_for_what_is_listed() -> None:
    ones = equations()
    _module, functions = lowered(ones)  # ops live as long as their module
    compared: set[str] = set()
    only: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for i, one in enumerate(ones):
        name = one.eqns[0].primitive.name
        try:
            theirs = Reading(functions).indices(f"equation_{i}")
        except Unknown:
            continue
        compared.add(name)
        ours = tables(one)
        for found, more, less in zip(only, (ours, theirs), (theirs, ours), strict=True):
            if more - less:
                found.setdefault(name, f"{one.eqns[0]}\n  opens {sorted(more - less)}")
    for found, known, who in zip(only, (ONLY_TABLE, ONLY_SHARDY), ("the table", "Shardy"), strict=True):
        new = "\n".join(f"{name}: {what}" for name, what in found.items() if name not in known)
        assert not new, f"only {who} opens an index of\n{new}"
        gone = known.keys() & compared - found.keys()
        assert not gone, f"{who} opens no more than the other of {gone}"
    assert len(compared) > 100


def examples() -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
    """One example for each primitive that test_table does not see to."""
    found: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {}
    for fun, args in others():
        for name in primitives_in(fragment(fun, *args)) & (RULED | NESTED):
            found.setdefault(name, (fun, args))
    return {name: one for name, one in found.items() if name not in test_table.SEEN_TO}


# JAX calls one of them so, by version; one is made only where a program is lowered. Kernels have a file of their own,
# tests/lax_primitives/test_gpu_kernels.py: cuDNN's are made only where it is found, and verified on stand-ins.
NOT_TRACED = {"debug_callback", "debug_print", "empty2", "pallas_call"}
NOT_TRACED |= {f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")}


@pytest.mark.one_day_in(2)
def test_every_primitive_of_the_table_is_verified() -> None:
    """Those that test_table does not: forward and backward, in 2, 3 and 4 parts, the day's share, compiled together."""
    found = examples()
    lacking = (RULED | NESTED) - test_table.SEEN_TO - found.keys() - NOT_TRACED
    of_another_jax = {*test_table.ELEMENTWISE, *test_table.CASES} - test_table.PRIMITIVES.keys()
    assert not lacking - of_another_jax, "add an example"
    reports = verify_rules(of_the_day({id(fun): (fun, args) for fun, args in found.values()}.values()))
    unchecked = [report for report in reports if not report.checks]
    assert all(any("callback" in why for *_, why in report.blocked) for report in unchecked), unchecked  # these stay whole
    assert SEED != "all" or sum(len(report.checks) for report in reports) > 150
