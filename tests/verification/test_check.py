"""The verifier passes what is right, and names what is wrong: planted faults, each with its message."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lower.steps import (
    ADAMW,
    MOMENTUM,
    batch_and_hidden,
    make_batch,
    make_state,
    make_step,
    planned,
    tensor_parallel,
    tied_loss,
    with_segment,
)
from materialize.layouts import every_layout, mesh_of
from of_the_day import of_the_day

import jscaler
from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask, Share
from jscaler.lower import emit
from jscaler.lower.emit_collectives import exchange
from jscaler.lower.emit_point_to_point import run_regions
from jscaler.lower.program import Compute
from jscaler.materialize import Layout, find_adapter
from jscaler.materialize.point_to_point import Holding, plan_regions
from jscaler.verification import Report, flow, verify_exchange
from jscaler.verification.frames import Frame
from jscaler.verification.local_programs import abstract_mesh

MESH = mesh_of(2, 2)
SHAPE = (8, 8)
Local = Callable[[Any], Any]


def layout(rows: tuple[str, ...] = (), columns: tuple[str, ...] = (), **values: str) -> Layout:
    return Layout(MESH, ((8,), (8,)), (rows, columns), tuple(values.items()))


def masks(some: Layout) -> list[Mask]:
    return [some.mask(p) for p in range(len(some.mesh.devices))]


def prove(fun: Local, source: Layout, target: Layout, dtype: str = "float32") -> Report:
    return verify_exchange(fun, source.mesh, source.shape, dtype, masks(source), masks(target))


WHOLE, SHARED = layout(), layout(x0="add")
ROWS, COLUMNS = layout(("x0",)), layout((), ("x0",))
DEEP, DEEP_SHARED = layout(("x0", "x1")), layout(x0="add", x1="add")


def gather(axes: Any, **more: Any) -> Local:
    return lambda x: lax.all_gather(x, axes, axis=0, tiled=True, **more)


def scatter(axes: Any, dim: int) -> Local:
    return lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def exchanged(split: int, concat: int) -> Local:
    return lambda x: lax.all_to_all(x, "x0", split, concat, tiled=True)


def cut(axis: str, shift: int = 0) -> Local:
    return lambda x: lax.dynamic_slice_in_dim(x, (lax.axis_index(axis) + shift) % 2 * 4, 4, 0)


def masked(axis: str, keep: int = 0) -> Local:
    return lambda x: jnp.where(lax.axis_index(axis) == keep, x, 0)


RIGHT = {
    "gather": (gather(("x0", "x1")), DEEP, WHOLE),
    "reduce": (lambda x: lax.psum(x, ("x1", "x0")), DEEP_SHARED, WHOLE),
    "reduce one of two": (lambda x: lax.psum(x, "x0"), DEEP_SHARED, layout(x1="add")),
    "scatter": (scatter("x0", 0), SHARED, ROWS),
    "exchange": (exchanged(1, 0), ROWS, COLUMNS),
    "slice": (cut("x0"), WHOLE, ROWS),
    "value mask": (masked("x0"), WHOLE, SHARED),
    "value mask of the other": (masked("x0", keep=1), WHOLE, SHARED),
    "shares change hands": (lambda x: lax.ppermute(x, "x0", [(0, 1), (1, 0)]), SHARED, SHARED),
    "permute": (lambda x: lax.ppermute(x, ("x0", "x1"), [(0, 0), (1, 2), (2, 1), (3, 3)]), DEEP, layout(("x1", "x0"))),
    "maximum twice": (lambda x: lax.pmax(lax.pmax(x, "x0"), "x0"), layout(x0="max"), WHOLE),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RIGHT)
def test_right_exchanges(name: str) -> None:
    report = prove(*RIGHT[name])
    assert (report.devices, report.exchanges) == (4, 1)
    assert report.elements == sum(m.size for m in masks(RIGHT[name][2]))


def one_branch(x: jax.Array) -> jax.Array:
    return lax.cond(lax.axis_index("x0") == 0, lambda v: lax.psum(v, "x0"), lambda v: 1 * v, x)


FAULTS = {
    # order
    "gather with axes reversed": (
        gather(("x1", "x0")), DEEP, WHOLE,
        r"by all_gather: device 0 holds element \(4, 0\) where element \(2, 0\) belongs; 32 such elements, in \[2:6, 0:8\]",
    ),
    "gather with members swapped": (
        gather(("x0", "x1"), axis_index_groups=[[0, 1, 3, 2]]), DEEP, WHOLE,
        r"device 0 holds element \(6, 0\) where element \(4, 0\) belongs",
    ),
    "gather of groups reordered": (
        gather(("x0", "x1"), axis_index_groups=[[0, 3], [1, 2]]), DEEP, layout(("x0",)),
        r"device 0 holds element \(6, 0\) where element \(2, 0\) belongs",
    ),
    "two receivers swapped": (
        lambda x: lax.ppermute(x, ("x0", "x1"), [(0, 0), (1, 1), (2, 2), (3, 3)]), DEEP, layout(("x1", "x0")),
        r"by ppermute: device 1 holds element \(2, 0\) where element \(4, 0\) belongs",
    ),
    "a target twice": (
        lambda x: lax.ppermute(x, ("x0", "x1"), [(0, 1), (1, 2), (2, 1), (3, 3)]), DEEP, layout(("x1", "x0")),
        r"ppermute over x0, x1 at .*: member 1 receives twice in \[\(0, 1\), \(1, 2\), \(2, 1\), \(3, 3\)\]",
    ),
    "a receiver left out": (
        lambda x: lax.ppermute(x, "x0", [(1, 0)]), SHARED, SHARED,
        r"devices 0 2 together lack share 0 of element \(0, 0\) \(share 1; expected 0 1\)",
    ),
    # summands
    "a reduction over a subgroup": (
        lambda x: lax.psum(x, "x0"), DEEP_SHARED, WHOLE,
        r"by psum: device 0 lacks share 0.1 1.1 of element \(0, 0\) \(shares 0.0 1.0; expected 0.0 0.1 1.0 1.1\)",
    ),
    "no reduction": (lambda x: x, SHARED, WHOLE, r"exchange: device 0 lacks share 1 of element \(0, 0\) \(share 0; "),
    "a reduction twice": (
        lambda x: lax.psum(lax.psum(x, "x0"), "x0"), SHARED, WHOLE,
        r"by psum, psum: device 0 holds element \(0, 0\) twice \(shares 0 0 1 1; expected 0 1\); 64 such .* \[0:8, 0:8\]",
    ),
    "one share added again": (
        lambda x: lax.psum(x, "x0") + x, SHARED, WHOLE,
        r"device 0 holds element \(0, 0\) twice \(shares 0 0 1; expected 0 1\)",
    ),
    "a sum of replicas": (
        lambda x: lax.psum(x, ("x0", "x1")), SHARED, WHOLE, r"device 0 holds element \(0, 0\) twice \(shares 0 0 1 1; ",
    ),
    "a sum of whole values": (
        lambda x: lax.psum(x, ("x0", "x1")), WHOLE, WHOLE, r"element \(0, 0\) 4 times \(shares whole whole whole whole",
    ),
    "the wrong combiner": (
        lambda x: lax.pmax(x, "x0"), SHARED, WHOLE,
        r"device 0 holds for element \(0, 0\) the maximum of shares of a sum, pmax over x0 at .*test_check.py:\d+",
    ),
    "a sum of maxima": (lambda x: lax.psum(x, "x0"), layout(x0="max"), WHOLE, "the sum of shares of a maximum"),
    "nested shares from the outside": (
        lambda x: lax.pmax(lax.psum(x, "x0"), "x1"), layout(x0="add", x1="max"), WHOLE, "the sum of shares of a maximum",
    ),
    "parts of different elements": (
        lambda x: lax.psum(x, "x0"), ROWS, ROWS, r"the sum of element \(0, 0\) with element \(4, 0\), psum over x0 at",
    ),
    "a constant added": (lambda x: lax.psum(x, "x0") + 1, SHARED, WHOLE, "the sum of data and a constant, add at"),
    "a mean": (lambda x: lax.pmean(x, "x0"), SHARED, WHOLE, r"div at .* works on data under way"),
    # places
    "the index of another axis": (
        cut("x1"), WHOLE, ROWS, r"device 1 holds element \(4, 0\) where element \(0, 0\) belongs",
    ),
    "a slice off by one block": (
        cut("x0", 1), WHOLE, ROWS, r"device 0 holds element \(4, 0\) where element \(0, 0\) belongs",
    ),
    "a slice beyond the end": (
        lambda x: lax.dynamic_slice_in_dim(x, (lax.axis_index("x0") + 1) * 4, 4, 0), WHOLE, ROWS,
        r"dynamic_slice at .* reaches beyond its array on devices \[2, 3\]",
    ),
    "a scatter into the wrong dim": (
        scatter("x0", 1), SHARED, layout(("x0",)), r"leaves local arrays of \[8, 4\]; \[4, 8\] are wanted",
    ),
    "a scatter of parts into the wrong dim": (
        scatter("x0", 1), layout((), ("x1",), x0="add"), layout((), ("x0", "x1")),
        r"by reduce_scatter: device 1 holds element \(0, 4\) where element \(0, 2\) belongs",
    ),
    "an exchange joined in the wrong dim": (
        exchanged(1, 1), ROWS, COLUMNS, r"leaves local arrays of \[4, 8\]; \[8, 4\] are wanted",
    ),
    "an exchange joined in the wrong dim of equal size": (
        exchanged(1, 1), ROWS, ROWS, r"device 0 holds element \(4, 0\) where element \(0, 4\) belongs",
    ),
    # value masks
    "a value mask along another axis": (masked("x1"), WHOLE, SHARED, r"devices 0 2 together hold element \(0, 0\) twice"),
    "a value mask that nobody passes": (
        masked("x0", keep=2), WHOLE, SHARED, r"devices 0 2 together lack element \(0, 0\): nothing \(neutral for add\)",
    ),
    "a value mask on one device of all": (
        masked(("x0", "x1")), WHOLE, SHARED,
        r"devices 0 1 differ in element \(0, 0\) of share 0: share whole against nothing \(neutral for add\)",
    ),
    "zeros where a maximum is wanted": (masked("x0"), WHOLE, layout(x0="max"), "the maximum of data and a constant"),
    # the rest
    "a collective in one branch": (
        one_branch, SHARED, WHOLE,
        r"cond at .*: devices \[0, 1\] wait in psum over x0 at .* for devices \[2, 3\], which end their branch without it",
    ),
    "another dtype": (lambda x: lax.psum(x, "x0").astype(jnp.bfloat16), SHARED, WHOLE, "makes bfloat16 of float32"),
    "the first element in the last one's place": (
        lambda x: gather("x0")(x).at[7, 7].set(gather("x0")(x)[0, 0]), ROWS, WHOLE,
        r"device 0 holds element \(0, 0\) where element \(7, 7\) belongs",
    ),
    "a transpose": (lambda x: x.T, ROWS, COLUMNS, r"device 0 holds element \(1, 0\) where element \(0, 1\) belongs"),
    "no data": (lambda x: jnp.zeros((8, 8)), WHOLE, WHOLE, r"device 0 lacks element \(0, 0\): nothing \(neutral for add\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str) -> None:
    fun, source, target, message = FAULTS[name]
    with pytest.raises(VerificationError, match=message):
        prove(fun, source, target)


def test_uneven_parts_are_padded() -> None:
    """Seven rows on two devices: the last row of the second is padding, which may hold anything."""
    halves = [Mask(((7,),), (((0, 4),),)), Mask(((7,),), (((4, 7),),))]
    whole = [Mask.whole((7,))] * 2
    mesh = mesh_of(2)
    verify_exchange(lambda x: gather("x0")(x)[:7], mesh, (7,), "float32", halves, whole)
    verify_exchange(
        lambda x: x * (1 - 7 * (jnp.arange(4) + 4 * lax.axis_index("x0") == 7)), mesh, (7,), "float32", halves, halves
    )
    with pytest.raises(VerificationError, match="device 0 holds for element \\(6,\\) padding beyond the end"):
        verify_exchange(lambda x: gather("x0")(x)[1:], mesh, (7,), "float32", halves, whole)


def test_devices_that_hold_or_want_nothing() -> None:
    held, wanted = [Mask.whole((4,)), None], [None, Mask.whole((4,))]
    verify_exchange(lambda x: lax.ppermute(x, "x0", [(0, 1)]), mesh_of(2), (4,), "float32", held, wanted, packed=True)
    with pytest.raises(VerificationError, match=r"device 1 holds for element \(0,\) padding"):
        verify_exchange(lambda x: x, mesh_of(2), (4,), "float32", held, wanted, packed=True)


def test_shares_of_uneven_depth() -> None:
    """Summand 1 is held in three parts; the consumers want summand 0 in two."""
    leaves = [(Share(0, 2),), *((Share(1, 2), Share(i, 3)) for i in range(3))]
    held = [Mask(((2,),), (((0, 2),),), s) for s in leaves]
    assert (
        verify_exchange(lambda x: lax.psum(x, "x0"), mesh_of(4), (2,), "int32", held, [Mask.whole((2,))] * 4).elements == 8
    )
    assert verify_exchange(lambda x: x, mesh_of(4), (2,), "int32", held, held).elements == 8
    with pytest.raises(VerificationError, match=r"devices 0 1 2 want shares of \[0:2\] share 0/2 add without share 2 of 3"):
        verify_exchange(lambda x: x, mesh_of(4), (2,), "int32", held, [*held[:3], held[2]])


@pytest.mark.parametrize("kind", ["DeviceMesh", "Mesh", "AbstractMesh"])
def test_devices_are_named_as_the_mesh_names_them(kind: str) -> None:
    swapped = mesh_of(2, devices=(5, 3))
    meshes = {
        "DeviceMesh": (swapped, 5),
        "Mesh": (Mesh(np.array(jax.devices())[[5, 3]], ("x0",)), 5),
        "AbstractMesh": (abstract_mesh({"x0": 2}), 0),
    }
    mesh, first = meshes[kind]
    whole = [Mask.whole((4,))] * 2
    with pytest.raises(VerificationError, match=f"step 3: device {first} lacks element"):
        verify_exchange(jnp.zeros_like, mesh, (4,), "float32", whole, whole, where="step 3")


# What the planner emits


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sizes", "subdims", "combiners"),
    of_the_day(
        [
            ((2, 2), ((4,), (8,)), ("add",)),
            ((2, 2), ((3,), (8,)), ("add",)),
            ((4,), ((4, 2), (8,)), ("add", "max")),
            ((2, 2), ((4,),), ("add", "min")),
        ],
        2,
    ),
    ids=str,
)
def test_all_pairs_of_layouts(sizes: tuple[int, ...], subdims: Any, combiners: tuple[str, ...]) -> None:
    mesh = mesh_of(*sizes)
    layouts = list(every_layout(mesh, subdims, combiners))
    for source, target in itertools.product(layouts, layouts):
        adapter = find_adapter(source, target, 4)
        held, wanted = masks(source), masks(target)
        fun = lambda x, adapter=adapter: exchange(adapter, x, mesh)  # noqa: E731
        verify_exchange(fun, mesh, source.shape, "float32", held, wanted, where=f"{source} -> {target} by {adapter}")


def test_messages_between_groups_of_devices() -> None:
    """Five uneven parts on devices 0 to 4, with a halo on 3 to 7; the plan of another halo is found out."""
    parts = [(0, 4), (4, 5), (5, 9), (9, 11), (11, 12)]
    held = [Mask(((12,), (4,)), ((part,), ((0, 4),))) for part in parts]
    halos = [[Mask(((12,), (4,)), (((max(0, a - n), min(12, b + n)),), ((0, 4),))) for a, b in parts] for n in (1, 2)]

    def check(planned: list[Mask], wanted: list[Mask]) -> Report:
        holdings = [Holding(p, m) for p, m in enumerate(held)], [[Holding(p, m) for p, m in enumerate(planned, 3)]]
        regions = plan_regions((12, 4), *holdings, 8)
        size = Frame(wanted, packed=True).shape[0]
        fun = lambda x: jnp.pad(run_regions(regions, x, ("x0", "x1"))[0], ((0, 2), (0, 0)))[:size]  # noqa: E731
        before, after = [*held, None, None, None], [None, None, None, *wanted]
        return verify_exchange(fun, mesh_of(2, 4), (12, 4), "float32", before, after, packed=True)

    assert check(halos[1], halos[1]).collectives["ppermute"] > 1
    with pytest.raises(VerificationError, match=r"device 4 holds element \(3, 0\) where element \(2, 0\) belongs"):
        check(halos[0], halos[1])


@pytest.mark.parametrize(
    ("policy", "devices"),
    of_the_day([("single", 1), ("data_parallel", 8), (tensor_parallel, 4), (batch_and_hidden, 8)], 2),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
@pytest.mark.parametrize("tx", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_whole_steps(policy: Any, devices: int, tx: Any) -> None:
    plan = planned(policy, devices, tx=tx)
    report = jscaler.verify(plan)
    assert report.exchanges == len(plan.program.adapters)
    assert report.reads >= sum(len(t.inputs) for t in plan.program.tasks if isinstance(t, Compute))
    assert bool(report.collectives) == (devices > 1)


def test_a_lowered_step_and_its_report() -> None:
    step = jscaler.parallelize("data_parallel", devices=8)(make_step(tied_loss))
    lowered = step.lower(make_state(MOMENTUM), make_batch())
    text = str(jscaler.verify(lowered))
    assert text.startswith("verified on 8 devices\n  exchanges    ")
    assert " psum\n  elements     " in text
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x0",)), P("x0"))
    ends = lowered.executable.ins
    ins = ends.of_parts
    other = next(i for i, t in enumerate(lowered.graph.inputs) if t.shape and t.shape[0] % 8 == 0 and ins[i].spec == P())
    ends = dataclasses.replace(ends, of_parts=(*ins[:other], sharding, *ins[other + 1 :]))
    wrong = dataclasses.replace(lowered.executable, ins=ends)
    with pytest.raises(VerificationError, match=r"input '.*': .*0 has \[.*\] by its sharding, \[.*\] by the program"):
        jscaler.verify(dataclasses.replace(lowered, executable=wrong))


# Planted faults of whole steps


def test_an_exchange_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("data_parallel", 8)
    monkeypatch.setattr(flow, "exchange", lambda adapter, local, mesh, reduce_dtype=None: local)
    with pytest.raises(
        VerificationError, match=r"^step \d+, exchange of '.*': device 0 lacks share 1 2 3 4 5 6 7 of element"
    ):
        jscaler.verify(plan)


def test_an_emitted_program_that_is_not_the_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("data_parallel", 8)
    monkeypatch.setattr(emit, "exchange", lambda adapter, local, *_: local)
    with pytest.raises(VerificationError, match=r"output \d+ '.*': the emitted program computes another value"):
        jscaler.verify(plan)


def test_results_of_the_flat_program_swapped() -> None:
    plan = planned("data_parallel", 8)
    outputs = list(plan.flat.outputs)
    shapes = [v.aval.shape for v in outputs]
    i, j = next((i, j) for i, j in itertools.combinations(range(len(outputs)), 2) if shapes[i] == shapes[j])
    outputs[i], outputs[j] = outputs[j], outputs[i]
    flat = dataclasses.replace(plan.flat, outputs=tuple(outputs))
    with pytest.raises(VerificationError, match=rf"output {i} '.*': the emitted program computes another value"):
        jscaler.verify(with_segment(plan, flat=flat))


def test_an_op_that_reads_what_is_not_there() -> None:
    """The down projection reads its input cut in rows where it lies whole, or the other way round."""
    plan = planned("data_parallel", 8)
    laid = plan.completed.ops["up/dot"]
    inputs = tuple(Layout.replicated(x.mesh, x.shape) for x in laid.inputs)
    ops = {**plan.completed.ops, "up/dot": dataclasses.replace(laid, inputs=inputs)}
    wrong = dataclasses.replace(plan, completed=dataclasses.replace(plan.completed, ops=ops))
    with pytest.raises(
        VerificationError, match=r"op 'up/dot', input 0 'batch/x': parts of \[2, 8\] lie where \[16, 8\] are read"
    ):
        jscaler.verify(wrong)


def test_a_slot_that_holds_another_tensor() -> None:
    plan = planned("data_parallel", 8)
    at = next(i for i, t in enumerate(plan.program.tasks) if isinstance(t, Compute) and len(t.inputs) > 1)
    task = plan.program.tasks[at]
    tasks = (*plan.program.tasks[:at], dataclasses.replace(task, inputs=task.inputs[::-1]), *plan.program.tasks[at + 1 :])
    wrong = with_segment(plan, program=dataclasses.replace(plan.program, tasks=tasks))
    with pytest.raises(VerificationError, match=r"op '.*', input 0 '.*': its slot holds '.*'"):
        jscaler.verify(wrong)


def test_specs_mean_what_jax_says() -> None:
    sizes, shape = {"a": 2, "b": 2, "c": 2}, (8, 4)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(sizes))
    for spec in (P(), P("b"), P(None, "c"), P(("c", "a"), "b"), P(("a", "b", "c"))):
        table = NamedSharding(mesh, spec).devices_indices_map(shape)
        for device, mask in zip(mesh.devices.flat, flow.spec_masks(spec, sizes, shape), strict=True):
            assert [i.indices(n)[:2] for i, n in zip(table[device], shape, strict=True)] == [d[0] for d in mask.box]
