"""What a backward reads: its forward's inputs, or residuals that the forward saves, by default where a custom_vjp is."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from user_ops import attend, attend_op, attention_step, make_params, wrong, wrong_op

import jscaler
from jscaler import PlanError, PlanFitError, Split
from jscaler.capture.jaxprs import trace_flat
from jscaler.capture.saving import Leaf, trace_saving
from jscaler.primitives import Plan
from jscaler.primitives.plan import SaveResiduals

marker_p = core.Primitive("marker")  # what a custom forward does, and must do once
marker_p.def_impl(lambda x: x)
marker_p.def_abstract_eval(lambda x: x)
jax.interpreters.mlir.register_lowering(marker_p, lambda ctx, x: [x])
jscaler.register_rule(marker_p, "... -> ...")


def lowered(step: Callable[..., Any], policy: Any, *args: Any, devices: int = 2) -> Any:
    return jscaler.parallelize(policy, devices=devices)(step).lower(*args)


def equations(made: Any) -> Iterator[str]:
    """The primitives of the flat program."""
    yield from (e.primitive.name for e in made.plan.flat.equations)


def say(path: str, mode: Any, *factors: str) -> Callable[..., Any]:
    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph.select(path)[0]
        if mode:
            graph.residuals(op, mode)
        if factors:
            graph.op_assign(graph.op_trans(op, *(Split(f, 2) for f in factors)), devices.reshape((2,) * len(factors)))

    return policy


ATTENTIONS = {"*custom_vjp_call": attend, "*attend": attend_op}


@pytest.mark.parametrize("path", ATTENTIONS)
def test_residuals_are_tensors_and_what_is_at_hand_stays_what_it_is(path: str) -> None:
    args = make_params(np.random.default_rng(0), np.float32), np.ones((2, 4, 6), np.float32)
    made = lowered(attention_step(ATTENTIONS[path]), say(path, None), *args)
    (op,) = made.plan.source.select(path)
    assert op.residuals == "saved"
    out, lse = op.outputs
    assert (lse.name, lse.shape, lse.role) == (f"{op.path}:residual:0", (2, 4, 4), "residual")
    (backward,) = (o for o in made.plan.source.ops if o.path == f"{op.path}@backward")
    assert backward.inputs == (*op.inputs, out, lse, dict(backward.cotangents)[0])  # q, k, v and the result are no copies


@pytest.mark.parametrize("path", ATTENTIONS)
@pytest.mark.parametrize(("mode", "softmaxes", "forwards"), [(None, 0, 1), ("saved", 0, 1), ("inputs", 1, 1)])
def test_saved_the_forward_runs_once(path: str, mode: Any, softmaxes: int, forwards: int) -> None:
    """The primal divides by a sum, the custom forward subtracts its log; only reading the inputs needs both."""
    args = make_params(np.random.default_rng(0), np.float32), np.ones((2, 4, 6), np.float32)
    found = list(equations(lowered(attention_step(ATTENTIONS[path]), say(path, mode), *args)))
    assert found.count("log") == forwards
    assert found.count("reduce_max") == softmaxes


@pytest.mark.parametrize(("mode", "times"), [("saved", 1), ("inputs", 2)])
def test_a_kernel_in_forward_and_primal_runs_once(mode: Any, times: int) -> None:
    """Two calls of one opaque primitive on different operands cannot be merged."""

    @jax.custom_vjp
    def fun(x: Any) -> Any:
        return marker_p.bind(x * 2.0)

    fun.defvjp(lambda x: (marker_p.bind(x + x), (marker_p.bind(x + x), x)), lambda r, g: (g * r[0] + r[1],))

    def step(params: Any, x: Any) -> Any:
        return jscaler.value_and_grad(lambda p: (fun(p["w"] * x)).sum())(params)

    made = lowered(
        step, say("*custom_vjp_call", mode, "a"), {"w": np.ones((4, 3), np.float32)}, np.ones((4, 3), np.float32)
    )
    assert list(equations(made)).count("marker") == times


@pytest.mark.parametrize("mode", ["saved", "inputs"])
@pytest.mark.parametrize("fun", [wrong, wrong_op])
def test_a_wrong_derivative_stays_wrong(fun: Callable[..., Any], mode: Any) -> None:
    def step(params: Any, x: Any) -> Any:
        return jscaler.value_and_grad(lambda p: fun(p["w"] * x).sum())(params)

    w = np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3)
    args = {"w": w}, np.full((4, 3), 2, np.float32)
    (op,) = (o for o in jscaler.parallelize("single", devices=1)(step).graph(*args).forward() if o.residuals == "saved")
    (value, grads), (expected, theirs) = (
        lowered(step, say(op.path, mode, "a"), *args).compile()(*args),
        jax.jit(step)(*args),
    )
    np.testing.assert_allclose(value, expected, atol=1e-5)
    np.testing.assert_allclose(grads["w"], 2 * (100 * np.cos(2 * w) + 2 * w), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], theirs["w"], rtol=1e-6)


def test_what_has_no_custom_derivative_saves_nothing_unless_asked() -> None:
    def step(params: Any, x: Any) -> Any:
        return jscaler.value_and_grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)

    args = {"w": np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)}, np.ones((4, 3), np.float32)
    plain = lowered(step, say("*tanh", None), *args)
    (op,) = plain.plan.source.select("*tanh")
    assert op.residuals == "inputs"
    assert len(op.outputs) == 1
    saved = lowered(step, say("*tanh", "saved", "b"), *args)
    assert len(saved.plan.source[op.path].outputs) > 1
    for a, b in zip(*(jax.tree.leaves(m.compile()(*args)) for m in (plain, saved)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_where_saving_would_forbid_a_split_the_inputs_are_read() -> None:
    """The result is saved, and a part of the contracted dim has but a summand of it."""

    @jax.custom_vjp
    def product(x: Any, k: Any) -> Any:
        return x @ k

    def forward(x: Any, k: Any) -> Any:
        out = x @ k
        return out, (x, k, out)

    product.defvjp(forward, lambda r, g: (g @ r[1].T, r[0].T @ g + 0 * r[2].sum()))
    fun = jscaler.op("n h, h o -> n o")(product)

    def step(params: Any, x: Any) -> Any:
        return jscaler.value_and_grad(lambda p: (fun(x, p["w"]) ** 2).sum())(params)

    args = {"w": np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3)}, np.ones((2, 4), np.float32)
    made = lowered(step, say("*product", None, "h"), *args)
    assert len(made.plan.source.select("*product")[0].outputs) == 1
    np.testing.assert_allclose(made.compile()(*args)[1]["w"], jax.jit(step)(*args)[1]["w"], atol=1e-5)
    with pytest.raises(PlanError, match=r"it cannot be split along 'h' \(at product a part's share of a result is saved"):
        lowered(step, say("*product", "saved", "h"), *args)


def test_residuals_of_what_has_none() -> None:
    step = attention_step(attend_op)
    args = make_params(np.random.default_rng(0), np.float32), np.ones((2, 4, 6), np.float32)
    with pytest.raises(PlanError, match="residuals are 'inputs' or 'saved', not 'all'"):
        lowered(step, say("*attend", "all"), *args)
    with pytest.raises(PlanError, match="is a update op without a backward"):
        lowered(step, lambda g, d: g.residuals(g.update()[0], "saved"), *args)
    with pytest.raises(PlanFitError, match=r"op 'other' is not in the graph; .*'residuals other saved' names it"):
        lowered(step, Plan("of another step", 2, (SaveResiduals("other", "saved"),)), *args)


def test_the_digest_of_a_plan_knows_of_residuals() -> None:
    args = make_params(np.random.default_rng(0), np.float32), np.ones((2, 4, 6), np.float32)
    step = attention_step(attend_op)
    digests = {lowered(step, say("*attend", mode), *args).plan.digest for mode in (None, "saved", "inputs")}
    assert len(digests) == 3


def test_leaves_of_a_vjp() -> None:
    def fun(x: Any, n: Any) -> Any:
        return [jnp.sin(x) * n, jnp.exp(x)]

    structs = [jax.ShapeDtypeStruct((3,), np.float32), jax.ShapeDtypeStruct((3,), np.float32)]
    saving = trace_saving(fun, structs, (0,), (0, 1))
    assert Leaf("input", 1) in saving.leaves  # n
    assert Leaf("output", 1) in saving.leaves  # exp(x) is its own derivative
    assert len(saving.residuals) == 1  # cos(x)
    x, n = np.linspace(0, 1, 3, dtype=np.float32), np.arange(3, dtype=np.float32)
    results = jax.core.eval_jaxpr(saving.jaxpr, [], x, n)
    values = {Leaf("input", 0): x, Leaf("input", 1): n, **{Leaf("output", i): results[i] for i in (0, 1)}}
    values[Leaf("residual", 0)] = results[2]
    (dx,) = saving.apply(values, [np.ones(3, np.float32)] * 2)
    np.testing.assert_allclose(dx, np.cos(x) * n + np.exp(x), rtol=1e-6)
    assert trace_flat(lambda *v: saving.apply(values, list(v)), structs).eqns
