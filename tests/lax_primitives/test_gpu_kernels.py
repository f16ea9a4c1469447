"""Kernels that others wrote: Pallas by its grid, and cuDNN's attention by a stand-in of equal signature.

``fixtures/cudnn_attention.txt`` is the gradient of ``jax.nn.dot_product_attention(implementation="cudnn")`` as JAX 0.10.2
traces it (its checks for cuDNN answered with yes): the stand-in binds primitives of the same names, operands, parameters.
"""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend import core
from jax.interpreters import mlir

import jscaler
from jscaler.lax_primitives.gpu_kernels import attention, pallas
from jscaler.xla_model.flops import flops_of
from tests.rules.parts import fragment, why_blocked

rng = np.random.default_rng(46)
FIXTURE = Path(__file__).parent / "fixtures" / "cudnn_attention.txt"

# --- Pallas ---


def blocked_axes(spec: Any) -> tuple[set[int], set[int]]:
    """The axes of the grid that are indices, and of these the blocked ones."""
    labels = {label for side in (*spec.operands, *spec.results) for dim in side for label in dim}
    axes = {label: label[0][1] for label in labels if label[0][0] == "grid"}
    return set(axes.values()), {axis for label, axis in axes.items() if label in spec.blocked}


def copy_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...]


def numbered_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + pl.program_id(0)


def call(kernel: Any, grid: Any, block: Any, index: Any, out_block: Any = None, out_index: Any = None) -> core.JaxprEqn:
    x = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    specs = pl.BlockSpec(block, index), pl.BlockSpec(out_block or block, out_index or index)
    run = pl.pallas_call(kernel, x, grid=grid, in_specs=[specs[0]], out_specs=specs[1], interpret=True)
    return next(e for e in jax.make_jaxpr(run)(x).eqns if e.primitive.name == "pallas_call")


KERNELS = {  # the axes that are indices, and which of them are blocked
    "an element of each of two dims": ((copy_kernel, (4, 8), (None, None, 16), lambda i, j: (i, j, 0)), {0, 1}, set()),
    "a block of the second": ((copy_kernel, (4, 2), (None, 4, 16), lambda i, j: (i, j, 0)), {0}, set()),
    "blocks of one element": ((copy_kernel, (4, 8), (1, 1, 16), lambda i, j: (i, j, 0)), {0, 1}, set()),
    "axes in another order": ((copy_kernel, (8, 4), (None, None, 16), lambda j, i: (i, j, 0)), {0, 1}, set()),
    "a number that is asked for": ((numbered_kernel, (4, 8), (None, None, 16), lambda i, j: (i, j, 0)), {0, 1}, {0}),
    "a number that is computed with": ((copy_kernel, (4, 8), (None, None, 16), lambda i, j: (3 - i, j, 0)), {1}, set()),
    "a shared result": (
        (copy_kernel, (4, 8), (None, None, 16), lambda i, j: (i, j, 0), (None, None, 16), lambda i, j: (0, j, 0)),
        {0, 1}, {0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_an_axis_along_which_programs_have_one_element_each_is_an_index(name: str) -> None:
    arguments, axes, blocked = KERNELS[name]
    assert blocked_axes(pallas(call(*arguments))) == (axes, blocked)


def shapes(*sizes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def kernel_in(fun: Any, *avals: Any) -> core.JaxprEqn:
    """The Pallas call in a function, wherever it stands."""

    def every(jaxpr: core.Jaxpr) -> Any:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield eqn
            else:
                for inner in core.jaxprs_in_params(eqn.params):
                    yield from every(getattr(inner, "jaxpr", inner))

    return next(every(jax.make_jaxpr(fun)(*avals).jaxpr))


def row(*block: int | None) -> pl.BlockSpec:
    return pl.BlockSpec(block or (None, 16), lambda i: (i, 0))


def kernel(body: Any, out: Any, grid: int, specs: Any, out_spec: Any, **more: Any) -> Any:
    return pl.pallas_call(body, out, grid=(grid,), in_specs=specs, out_specs=out_spec, interpret=True, **more)


def test_parts_of_a_kernel_are_those_of_the_whole() -> None:
    """In 2, 3 and 4 parts, forward and backward, of the first and of the second dim; the third stays whole."""
    x = jax.ShapeDtypeStruct((12, 24, 4), jnp.float32)
    spec = pl.BlockSpec((None, 1, 4), lambda j, i: (i, j, 0))

    def scale(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * jnp.sum(y_ref[...])

    run = pl.pallas_call(scale, x, grid=(24, 12), in_specs=[spec, spec], out_specs=spec, interpret=True)

    @jax.custom_vjp
    def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
        return run(x, y)

    scaled.defvjp(lambda x, y: (run(x, y), (x, y)), lambda saved, g: (run(g, saved[1]), run(saved[0], g)))
    report = jscaler.verify_rule(scaled, *(rng.normal(size=x.shape).astype(np.float32) for _ in range(2)))
    assert {(check.factor, check.parts) for check in report.checks} == {(f, n) for f in "ab" for n in (2, 3, 4)}
    assert {check.direction.split(",")[0] for check in report.checks} == {"forward", "backward"}


def test_under_vmap_the_kernel_s_own_axis_is_the_one_that_it_asks_for() -> None:
    """``program_id`` counts the axes that the kernel was written with, and not those that vmap has put in front."""
    x, y = shapes((4, 8, 16), (8, 16))
    eqn = kernel_in(jax.vmap(kernel(numbered_kernel, y, 8, [row()], row())), x)
    assert eqn.params["grid_mapping"].grid == (4, 8)
    assert blocked_axes(pallas(eqn)) == ({0, 1}, {1})


def test_a_dim_of_more_elements_than_there_are_programs_is_no_index() -> None:
    x, y = shapes((8, 16), (4, 16))
    spec = pallas(kernel_in(kernel(copy_kernel, y, 4, [row()], row()), x))
    assert blocked_axes(spec)[1] == {0}


def test_what_is_written_over_an_operand_that_lies_otherwise_is_not_split() -> None:
    x, y = shapes((8, 16), (8, 16))

    def double(x_ref: Any, whole_ref: Any, out_ref: Any) -> None:
        del whole_ref
        out_ref[...] = 2 * x_ref[...]

    whole = pl.BlockSpec((8, 16), lambda i: (0, 0))
    found = kernel_in(kernel(double, y, 8, [row(), whole], row(), input_output_aliases={1: 0}), x, y)
    assert blocked_axes(pallas(found)) == ({0}, {0})
    alike = kernel_in(kernel(double, y, 8, [row(), row()], row(), input_output_aliases={1: 0}), x, y)
    assert blocked_axes(pallas(alike)) == ({0}, set())


def test_programs_that_share_scratch_memory_stay_together() -> None:
    from jax.experimental.pallas import tpu

    (x,) = shapes((8, 16))

    def running(x_ref: Any, out_ref: Any, sums: Any) -> None:
        sums[...] += x_ref[...]
        out_ref[...] = sums[...]

    eqn = kernel_in(kernel(running, x, 8, [row()], row(), scratch_shapes=[tpu.VMEM((16,), jnp.float32)]), x)
    assert blocked_axes(pallas(eqn)) == (set(), set())


def test_windows_by_element_are_no_blocks() -> None:
    """Program i reads the row in front of its own, which lies beyond a part."""
    (x,) = shapes((8, 16))
    before = pl.BlockSpec((pl.Element(1, padding=(1, 0)), 16), lambda i: (i, 0))
    eqn = kernel_in(kernel(copy_kernel, x, 8, [before], row(1, 16)), x)
    assert blocked_axes(pallas(eqn))[1] == {0}


def test_why_a_dim_of_a_kernel_is_not_split_is_said() -> None:
    x = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    spec = pl.BlockSpec((None, 4, 16), lambda i, j: (i, j, 0))
    run = pl.pallas_call(copy_kernel, x, grid=(4, 2), in_specs=[spec], out_specs=spec, interpret=True)
    body = fragment(run, x)
    assert "each program of the kernel may see all of it" in why_blocked(body, 0, 1)


def mha() -> Callable[..., jax.Array]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer JAX points to another library
        from jax.experimental.pallas.ops.gpu import attention as kernels

        sizes = kernels.BlockSizes(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)
    return functools.partial(kernels.mha, segment_ids=None, sm_scale=0.25, causal=True, interpret=True, block_sizes=sizes)


def make_step(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A layer of attention by ``attend`` on 32 wide tokens, and gradient descent."""

    def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q = jnp.einsum("btm,mhd->bthd", x, p["q"])
        k, v = (jnp.einsum("btm,mhd->bthd", x, p[name]) for name in "kv")
        return x + jnp.einsum("bthd,hdm->btm", attend(q, k, v), p["out"])

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for one in params:
            x = layer(one, x)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def arguments(heads: tuple[int, int]) -> tuple[Any, Any]:
    sizes = {"q": (32, heads[0], 16), "k": (32, heads[1], 16), "v": (32, heads[1], 16), "out": (heads[0], 16, 32)}
    params = [{n: jnp.asarray(rng.normal(size=s) / 6, jnp.float32) for n, s in sizes.items()} for _ in range(1)]
    return params, {name: jnp.asarray(rng.normal(size=(4, 32, 32)), jnp.float32) for name in "xy"}


def after_two_steps(step: Callable[..., Any], params: Any, batch: Any) -> list[np.ndarray]:
    for _ in range(2):
        params, _ = step(params, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def grids(planned: Any, *args: Any) -> set[tuple[int, ...]]:
    return {
        tuple(eqn.params["grid_mapping"].grid)
        for block in planned.lower(*args).plan.blocks
        for eqn in block.flat.equations
        if eqn.primitive.name == "pallas_call"
    }


PLANS = {  # plan -> devices, and the parts of rows and of heads
    "data_parallel": (4, 4, 1),
    "tensor_parallel": (4, 1, 4),
    "megatron(dp=2, tp=2)": (4, 2, 2),
    "accumulate(2)": (1, 2, 1),
    'co_shard(2)': (1, 1, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def by_jit() -> dict[str, Any]:
    args = arguments((8, 8))
    return {"args": args, "expected": after_two_steps(jax.jit(make_step(mha())), *args)}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", PLANS)
def test_jax_s_own_attention_in_pallas_is_split_by_rows_and_heads_without_a_word(by_jit: Any, plan: str) -> None:
    devices, rows, heads = PLANS[plan]
    planned = jscaler.parallelize(plan, devices=devices)(make_step(mha()))
    found = after_two_steps(planned, *by_jit["args"])
    for a, b in zip(found, by_jit["expected"], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    assert (2, 4 // rows, 8 // heads) in grids(planned, *by_jit["args"])  # blocks of queries, rows, heads


# --- cuDNN's attention ---


def attend(q: Any, k: Any, v: Any, params: Any) -> tuple[jax.Array, jax.Array]:
    """Attention, and the log of each row's sum, for the layout of tokens before heads."""
    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, group, 2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), keys) * params["scale"]
    if "CAUSAL" in str(params["mask_type"]):
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e30)
    sums = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - sums[..., None])
    return jnp.einsum("bhts,bshd->bthd", weights, values).astype(q.dtype), sums


def forward(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> list[jax.Array]:
    del rest
    out, sums = attend(q, k, v, params)
    return [out, sums] if params["is_training"] else [out]


def backward(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> list[jax.Array]:
    *_, gradient = rest
    return list(jax.vjp(lambda *xs: attend(*xs, params)[0], q, k, v)[1](gradient))


def stand_in(name: str, fun: Any) -> core.Primitive:
    made = core.Primitive(name)
    made.multiple_results = True
    made.def_impl(fun)
    made.def_abstract_eval(
        lambda *avals, **params: [jax.typeof(x) for x in jax.eval_shape(functools.partial(fun, **params), *avals)]
    )
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=True))
    return made


FORWARD = stand_in("dot_product_attention_fwd_wrapper", forward)
BACKWARD = stand_in("dot_product_attention_bwd_wrapper", backward)


class MaskType:
    """Prints as JAX's own does."""

    def __repr__(self) -> str:
        return "MaskType.CAUSAL"


CAUSAL = MaskType()
SAID: dict[str, Any] = {
    "scale": 1 / 32**0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": CAUSAL,
    "layout": 0, "sliding_window_length": None,
}  # fmt: skip


def cudnn(**said: Any) -> Callable[..., jax.Array]:
    """What JAX makes of ``implementation="cudnn"``, by the stand-ins."""
    params = SAID | said

    def empty(q: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(0, q.dtype)] * 7

    @jax.custom_vjp
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return FORWARD.bind(q, k, v, *empty(q), is_training=False, **params)[0]

    def run_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, sums = FORWARD.bind(q, k, v, *empty(q), is_training=True, **params)
        return out, (q, k, v, sums, out)

    def run_backward(saved: Any, gradient: jax.Array) -> Any:
        q, k, v, sums, out = saved
        return tuple(BACKWARD.bind(q, k, v, *empty(q), sums, out, gradient, **params))

    run.defvjp(run_forward, run_backward)
    return run


def signature(text: str) -> list[tuple[str, ...]]:
    """Of each attention in a jaxpr's text its results' types, primitive, parameters by name, and number of operands."""
    found = re.findall(r"((?:\w+:\S+ )+)= (dot_product_attention_\w+)\[([^\]]*)\] ((?:\w+ ?)+)", text)
    return [
        (re.sub(r"\w+:", "", results).strip(), name, *sorted(re.findall(r"(\w+)=", said)), str(len(operands.split())))
        for results, name, said, operands in found
    ]


def test_the_stand_in_is_called_as_jax_calls_cudnn() -> None:
    q, k = jnp.ones((4, 64, 8, 32), jnp.bfloat16), jnp.ones((4, 64, 4, 32), jnp.bfloat16)
    made = jax.make_jaxpr(jax.grad(lambda *xs: cudnn()(*xs).astype(jnp.float32).sum(), (0, 1, 2)))(q, k, k)
    expected = signature(FIXTURE.read_text())
    assert len(expected) == 2
    assert signature(str(made)) == expected


def gradients_of(fun: Any, *args: Any) -> list[core.JaxprEqn]:
    """The forward and the backward of an attention."""
    made = jax.make_jaxpr(jax.grad(lambda *xs: fun(*xs).astype(jnp.float32).sum(), (0, 1, 2)))(*args)
    return [e for e in made.eqns if e.primitive.name.startswith("dot_product_attention")]


def test_batch_and_heads_are_indices_and_gradients_of_shared_heads_are_sums() -> None:
    q, k = jnp.ones((4, 64, 8, 32)), jnp.ones((4, 64, 4, 32))
    first, second = gradients_of(cudnn(), q, k, k)
    spec = attention(first)
    assert spec.operands[0] == ((("batch", 4),), (("queries", 64),), (("heads", 4), ("group", 2)), (("size 32", 32),))
    assert spec.operands[1] == ((("batch", 4),), (("keys", 64),), (("heads", 4),), (("size 32", 32),))
    assert spec.results[1] == ((("batch", 4),), (("heads", 4), ("group", 2)), (("queries", 64),))
    assert {name for name, _ in spec.blocked} == {"queries", "keys", "size 32"}
    gradients = attention(second).results
    assert [("group", 2) in dim for dim in (gradients[0][2], gradients[1][2], gradients[2][2])] == [True, False, False]
    with_draws = attention(gradients_of(cudnn(dropout_rate=0.1), q, k, k)[0])
    assert {("batch", 4), ("heads", 4), ("group", 2)} <= with_draws.blocked.keys()


def test_half_of_a_causal_attention_is_counted() -> None:
    q = jnp.ones((4, 64, 8, 32), jnp.bfloat16)
    first, second = gradients_of(cudnn(), q, q, q)
    one = 2 * 4 * 8 * 64 * 64 * 32
    assert (flops_of(first).count, flops_of(second).count) == (2 * one / 2, 5 * one / 2)
    assert flops_of(first).unit == "bfloat16"
    assert flops_of(gradients_of(cudnn(mask_type=None), q, q, q)[0]).count == 2 * one


def test_parts_of_cudnn_s_attention_are_those_of_the_whole() -> None:
    """In 2, 3 and 4 parts, forward and backward: rows, heads of keys, and their groups of queries."""
    q, k = (rng.normal(size=(12, 4, heads, 4)).astype(np.float32) for heads in (24, 12))
    report = jscaler.verify_rule(cudnn(scale=0.5), q, k, k + 1)
    assert {check.factor for check in report.checks} >= {"a", "c"}
    assert {check.parts for check in report.checks} == {2, 3, 4}


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_with_cudnn_s_attention_is_that_of_one_device(plan: str) -> None:
    devices, rows, heads = PLANS[plan]
    attending = cudnn(scale=0.25)
    args = arguments((8, 4))
    planned = jscaler.parallelize(plan, devices=devices)(make_step(attending))
    expected = after_two_steps(jax.jit(make_step(attending)), *args)
    for a, b in zip(after_two_steps(planned, *args), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    local = {
        tuple(eqn.invars[0].aval.shape)
        for block in planned.lower(*args).plan.blocks
        for eqn in block.flat.equations
        if eqn.primitive is FORWARD
    }
    assert local == {(4 // rows, 32, 8 // heads, 16)}


def test_attention_of_plain_equations_is_split_by_its_heads() -> None:
    """``implementation="xla"`` leaves no kernel: its heads are found by the dataflow."""
    args = arguments((8, 8))
    attending = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    expected = after_two_steps(jax.jit(make_step(attending)), *args)
    for plan in ("tensor_parallel", "co_shard(2)"):
        planned = jscaler.parallelize(plan, devices=PLANS[plan][0])(make_step(attending))
        for a, b in zip(after_two_steps(planned, *args), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
