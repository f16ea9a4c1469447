"""A plan as shardings of plain ``jax.jit``: the step's numbers, and the plan's collectives but for those named here."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from axial_steps import axial_images
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from lower.test_device_orders import STEP, arguments, rows_on
from of_the_day import of_the_day
from plan_steps import COLUMNS, TX, Step, gpt, made_once, mlp, with_arguments
from step_numbers import assert_trees_close
from test_expert_parallel import moe

import jscaler
from jscaler import CaptureError, DeviceError, PlanError, Split, plans
from jscaler.report.hlo import totals
from models.llama import Llama, LlamaConfig

BYTES = 8  # of a float64
ACTIVATIONS = 8 * 8 * 16 * BYTES  # of the GPT: rows, sequence, hidden
TABLE = 32 * 16 * BYTES  # its vocabulary by hidden
TIED = "a tied table has two gradients, and GSPMD adds up each over the devices before it adds the two"
SHARED = "of products that read one value, GSPMD adds up each cotangent over the devices before it adds them"
FETCHED = "checkpointed products gather their kernels again; on CPUs XLA merges the two gathers of jscaler's program"
MADE = dict[str, tuple[int, str]]


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = nn.tanh(nn.Conv(4, (3, 3), name=f"conv_{i}", param_dtype=x.dtype)(x))
        return nn.Dense(3, name="head", param_dtype=x.dtype)(x.mean((1, 2)))


@made_once
def convolutions() -> tuple[Step, tuple[Any, Any]]:
    draws = np.random.default_rng(0)
    x = np.asarray(draws.normal(size=(2, 8, 8, 3)), jnp.zeros(()).dtype)
    return with_arguments(Convolutions(), TX, {"x": x, "labels": np.array([0, 2])}, x)


@made_once
def llama() -> tuple[Step, tuple[Any, Any]]:
    sizes = {"hidden": 16, "layers": 2, "heads": 4, "groups": 2, "units": 24, "sequence": 8, "vocabulary": 32}
    graphdef, params = nnx.split(Llama(LlamaConfig(**sizes, param_dtype=jnp.zeros(()).dtype), nnx.Rngs(0)))

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, (params, gpt()[1][1])


def stacked() -> tuple[Step, tuple[Any, Any]]:
    return gpt(layers=2, stacked=True)


@dataclass(frozen=True)
class Case:
    """A step under a plan.

    Attributes:
        more: kind of collective -> bytes that GSPMD moves beyond the plan's (or less), and why.
    """

    plan: Any
    make: Callable[[], tuple[Step, Any]]
    devices: int
    more: MADE = field(default_factory=dict)


PLANS: Mapping[str, Case] = {
    "data parallel": Case("data_parallel", mlp, 8),
    "ZeRO-1": Case("zero1", mlp, 8),
    "ZeRO-3": Case("zero3", mlp, 4, {"all-gather": ((2 * 16 * 16 + 16 * 8) * BYTES, FETCHED)}),
    "tensor parallel": Case(plans.tensor_parallel(COLUMNS), mlp, 4),
    "dp × tp, ZeRO-1": Case(plans.megatron(2, 4, columns=COLUMNS, zero=1), mlp, 8),
    "sequence parallel": Case(plans.sequence_parallel(COLUMNS, {"batch/x": 0}), mlp, 4),
    "micro-batches": Case("accumulate(2, data_parallel())", mlp, 4),
    "vocabulary parallel": Case("vocab_parallel", gpt, 4),
    "dp × tp of GPT": Case(
        "megatron(2, 2)", gpt, 4, {"all-reduce": (2 * ACTIVATIONS // 2 + TABLE // 2, f"{SHARED} (q, k, v); {TIED}")}
    ),
    "sequence parallel GPT": Case(
        "sequence_parallel", gpt, 4, {"all-reduce": (2 * ACTIVATIONS + TABLE, f"{SHARED} (q, k, v); {TIED}")}
    ),
    "recompute": Case("recompute_layers(data_parallel())", stacked, 4, {"all-reduce": (TABLE, TIED)}),
    "stacked tensor parallel": Case(
        "tensor_parallel", stacked, 4, {"all-reduce": (2 * 2 * ACTIVATIONS, f"{SHARED} (q, k, v), of two layers")}
    ),
    "dp × tp of Llama": Case(
        "megatron(2, 2)", llama, 4, {"all-reduce": (2 * 3 * ACTIVATIONS // 2, f"{SHARED} (q, k, v; gate, up), twice")}
    ),
    "expert parallel": Case(
        "expert_parallel",
        functools.partial(moe, 1),
        4,
        {
            "all-reduce": (16 * 8 * BYTES, TIED),
            "all-gather": (12 * 8 * 4 * BYTES, "GSPMD does not split a top_k: it gathers the scores of experts"),
        },
    ),
    "spatial": Case(
        "spatial('batch/x')",
        convolutions,
        4,
        {
            "collective-permute": (2 * 2 * 8 * (3 + 4) * BYTES, "kernels' gradients exchange the edges of images again"),
            "all-reduce": (-2 * 3 * BYTES, "jscaler adds up what the head makes, beside what it reads"),
        },
    ),
    "axial": Case(
        "dap", axial_images, 4, {"all-reduce": (-2 * 3 * BYTES, "as of spatial, the head's logits are added up, too")}
    ),
}  # fmt: skip


def moved(compiled: Any) -> dict[str, int]:
    """Bytes by kind. On CPUs XLA makes no reduce-scatter of GSPMD's all-reduces: here one counts as the other."""
    found: dict[str, int] = {}
    for kind, total in totals(compiled.as_text()).items():
        kind = "all-reduce" if kind == "reduce-scatter" else kind
        found[kind] = found.get(kind, 0) + total.nbytes
    return found


def jitted(run: Any, found: Any, *args: Any) -> Any:
    return jax.jit(run, in_shardings=found.in_shardings, out_shardings=found.out_shardings).lower(*args).compile()


@functools.cache
def undecorated(make: Callable[[], tuple[Step, Any]]) -> Any:
    step, args = make()
    return jax.jit(step).lower(*args).compile()(*args)


CHEAP = [name for name, case in PLANS.items() if case.make in (mlp, convolutions)]


@pytest.mark.one_day_in(4)
@pytest.mark.parametrize("name", of_the_day(PLANS, 4, CHEAP))
def test_numbers_and_collectives(name: str) -> None:
    case = PLANS[name]
    with jax.enable_x64(True):
        step, args = case.make()
        lowered = jscaler.parallelize(case.plan, devices=case.devices)(step).lower(*args)
        found = lowered.plan.as_shardings()
        plain = jitted(found.constrained_step, found, *args)
        assert_trees_close(plain(*args), undecorated(case.make))
        ours, theirs = moved(lowered.compile().compiled), moved(plain)
        more = {kind: theirs.get(kind, 0) - ours.get(kind, 0) for kind in ours.keys() | theirs.keys()}
        assert {kind: n for kind, n in more.items() if n} == {kind: n for kind, (n, _) in case.more.items()}


def test_shardings_alone_run_the_step_itself() -> None:
    """The state lies as the parallelized step has it, so that either step takes what the other returns."""
    step, (state, batch) = mlp()
    compiled = jscaler.parallelize("zero1", devices=4)(step).lower(state, batch).compile()
    found = compiled.plan.as_shardings()
    (plain, loss), (ours, expected) = jitted(step, found, state, batch)(state, batch), compiled(state, batch)
    assert jax.tree.map(lambda x: x.sharding, plain) == jax.tree.map(lambda x: x.sharding, ours)
    assert_trees_close((plain, loss), (ours, expected))
    assert_trees_close(compiled(plain, batch), compiled(ours, batch))


def test_what_is_printed_can_be_pasted() -> None:
    step, args = mlp()
    plan = plans.megatron(2, 2, columns=COLUMNS, zero=3)
    found = jscaler.parallelize(plan, devices=4)(step).lower(*args).plan.as_shardings()
    assert str(found) == found.text
    sections = dict(part.split("\n", 1) for part in found.text.split("\n\n"))
    names: dict[str, Any] = {"Mesh": Mesh, "jax": jax, "np": np, "P": P}
    exec(sections["plan megatron"], names)
    assert names["mesh"] == found.mesh

    def specs(title: str) -> dict[str, Any]:
        rows = [line.rsplit("  ", 2) for line in sections[title].split("\n")]
        assert len({(name, kind) for name, kind, _ in rows}) == len(rows), "one row has one meaning"
        return {(name.strip(), kind.strip()): eval(spec, names) for name, kind, spec in rows}

    ins = specs("in_shardings")
    assert ins["batch/x", "f32[24,8]"] == found.in_shardings[1]["x"].spec == P("x0")
    stored = [layer["kernel"].spec for layer in found.in_shardings[0]["params"].values()]
    assert ins["state/params/layer_*/kernel", "f32[8,16]"] == stored[0]
    assert ins["state/params/layer_1/kernel", "f32[16,16]"] == stored[1] == P(("x1", "x0")), "rows, then ZeRO's parts"
    assert ins["state/params/layer_2/kernel", "f32[16,16]"] == stored[2] != stored[1]
    assert found.constraints["layer_0/dot"] == (P("x0", "x1"),)
    assert specs("with_sharding_constraint of results of")["{layer_0,layer_2}/{dot,add}", "f32[24,16]"] == P("x0", "x1")
    read = specs("with_sharding_constraint of what is read")
    assert read["state/params/layer_*/kernel by layer_*/dot", "f32[8,16]"] == P(None, "x1")
    assert found.reads["layer_0/dot"] == {"state/params/layer_0/kernel": P(None, "x1")}
    assert found.reads["layer_1/add"]["layer_1/dot:0"] == P("x0"), "where partial sums are added up"
    assert found.gradients["state/params/layer_1/kernel"] == stored[1]
    assert "18 leaves of arguments" in repr(found)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plans.tensor_parallel(COLUMNS), ["layer_*/dot: partial sums"]),
        ("zero3", ["loss/gather: partial sums", "state/params/layer_*/bias, state/params/layer_*/kernel: gathered again"]),
        ("accumulate(2, data_parallel())", ["parts in time (micro-batches", "layer_*/dot, ", "loss/div: partial sums"]),
        ("recompute_layers(single())", ["layer_*/dot/again, layer_*/again: computed again"]),
    ],
    ids=["shares", "gathers", "time", "recompute"],
)
def test_what_no_sharding_says_is_named(plan: Any, said: list[str]) -> None:
    step, args = mlp()
    found = jscaler.parallelize(plan, devices=4)(step).lower(*args).plan.as_shardings()
    assert len(found.left_out) == len(said)
    for one, start in zip(found.left_out, said, strict=True):
        assert str(one).startswith(start)
        assert str(one) in found.text


def test_a_parameter_that_is_read_in_front_of_its_gradient_keeps_it() -> None:
    """The value that ops outside of the gradient read is not the one that it is taken of."""

    def step(params: Any, batch: jax.Array) -> Any:
        with jax.named_scope("columns"):
            target = batch @ params["w"]
        with jax.named_scope("rows"):
            target = target * jnp.cos(batch @ params["w"])

        def loss(p: Any) -> jax.Array:
            with jax.named_scope("rows"):
                return ((batch @ p["w"] - target) ** 2).mean()

        value, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def plan(graph: Any, devices: np.ndarray) -> None:
        for op in [*graph.select("*dot*", kind="forward"), *graph.select("*dot*", kind="update")]:
            split = Split(("params/w", 1), 4) if "columns" in op.path else Split(("batch", 0), 4)
            graph.op_assign(graph.op_trans(op, split), devices)

    args = {"w": jax.random.normal(jax.random.key(0), (8, 4))}, jnp.ones((16, 8))
    found = jscaler.parallelize(plan, devices=4)(step).lower(*args).plan.as_shardings()
    assert found.in_shardings[0]["w"].spec == P(None, "x0")
    assert [read["params/w"] for read in found.reads.values() if "params/w" in read] == [P(), P()]
    assert_trees_close(jitted(found.constrained_step, found, *args)(*args), jax.jit(step)(*args))


def rows_in_three_and_columns_by_hand(graph: Any, devices: np.ndarray) -> None:
    rows = graph.op_trans(graph["layer_0/dot"], Split(("batch/x", 0), 3))
    graph.op_assign(rows, devices)
    columns = graph.op_trans(graph["layer_1/dot"], Split(("state/params/layer_1/kernel", 1), sizes=(5, 3, 8)))
    graph.op_assign(columns, devices)


def test_what_meshes_do_not_say_is_left_to_gspmd() -> None:
    """Values on the devices in another order, and blocks of unequal sizes."""
    args = arguments(a=(4, 4), b=(4, 4), both=(4,))
    unequal, unequal_args = mlp()
    steps = [
        (STEP, args, rows_on([0, 1, 2, 3], [2, 0, 3, 1]), 4, "on the devices in another order"),
        (unequal, unequal_args, rows_in_three_and_columns_by_hand, 3, "blocks of unequal sizes"),
    ]
    for step, given, plan, devices, why in steps:
        found = jscaler.parallelize(plan, devices=devices)(step).lower(*given).plan.as_shardings()
        assert why in [one.why for one in found.left_out]
        assert_trees_close(jitted(found.constrained_step, found, *given)(*given), jax.jit(step)(*given))


def test_static_arguments_and_objects_of_nnx() -> None:
    """Static arguments are those that the step was lowered with; of an object there are the arrays."""

    def step(scale: int, model: nnx.Linear, x: jax.Array) -> Any:
        loss, grads = jscaler.nnx.value_and_grad(lambda m: (m(x) ** 2).mean() * scale)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return {"loss": loss}

    model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((16, 8))
    lowered = jscaler.parallelize("zero1", devices=4, static_argnames="scale")(step).lower(3, model, x)
    found, pure = lowered.plan.as_shardings(), nnx.to_pure_dict(nnx.state(model))
    metrics, changed = jitted(found.constrained_step, found, pure, x)(pure, x)
    expected = lowered.compile()(3, model, x)
    assert_trees_close(metrics, expected)
    now = nnx.to_pure_dict(nnx.state(model))
    assert_trees_close(changed, {f"model/{name}": now[name] for name in ("bias", "kernel")})


def test_devices_that_are_not_at_hand() -> None:
    step, args = mlp()
    lowered = jscaler.parallelize("data_parallel", devices=12)(step).lower(*args)
    found = lowered.plan.as_shardings()
    assert isinstance(found.mesh, AbstractMesh)
    assert dict(found.mesh.shape) == {"x0": 12}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    jitted_step = jax.jit(found.constrained_step, in_shardings=found.in_shardings, out_shardings=found.out_shardings)
    traced = jitted_step.trace(*shapes)
    assert "num_partitions = 12" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_errors_name_what_to_do() -> None:
    step, (state, batch) = mlp()
    piped = jscaler.parallelize("pipeline(2, 2)", devices=4)(step)
    with pytest.raises(PlanError, match=r"'pipeline' has stages, on \[0 1\], \[2 3\].*without_stages\(\)"):
        piped.lower(state, batch).plan.as_shardings()
    assert piped.without_stages().lower(state, batch).plan.as_shardings().mesh.size == 4
    plan = jscaler.parallelize("data_parallel", devices=4)(step).lower(state, batch).plan
    assert plan.as_shardings(jax.devices()[4:]).mesh.devices.flat[0] == jax.devices()[4]
    with pytest.raises(DeviceError, match="'data_parallel' is for 4 devices, and 8 are given"):
        plan.as_shardings(jax.devices())
    constrained = plan.as_shardings().constrained_step
    with pytest.raises(CaptureError, match=r"'batch/labels' has shape \(12,\), and the step was lowered for \(24,\)"):
        constrained(state, {name: rows[:12] for name, rows in batch.items()})
    with pytest.raises(CaptureError, match="takes what the step was lowered for"):
        constrained(state, batch["x"])
