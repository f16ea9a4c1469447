"""``jscaler.verify_rule``: true rules pass with their numbers; of every lie it says which factor, parts and result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jscaler
from jscaler import CaptureError, UnknownNameError, VerificationError
from jscaler.verification.whole_against_parts import compare

rng = np.random.default_rng(8)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def op(rule: str, fun: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    return jscaler.op(rule, **keywords)(fun)


def flawed_vjp(x: Any) -> Any:
    """sin, whose derivative mixes what its forward does not."""
    return jnp.sin(x)


flawed = jax.custom_vjp(flawed_vjp)
flawed.defvjp(lambda x: (jnp.sin(x), (jnp.cos(x),)), lambda saved, g: (g * saved[0] - g.mean(-1, keepdims=True),))


@pytest.fixture(autouse=True)
def double() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.smoke
def test_a_true_rule_forward_and_backward() -> None:
    report = jscaler.verify_rule(op("b s h, h o -> b s o", jnp.matmul), real(2, 3, 4), real(4, 6))
    ran = {(c.direction, c.factor, c.kind, c.parts) for c in report.checks}
    assert ran == {
        ("forward", "b", "parallel", 2), ("forward", "s", "parallel", 3), ("forward", "h", "reduction", 2),
        ("forward", "h", "reduction", 4), ("forward", "o", "parallel", 2), ("forward", "o", "parallel", 3),
        ("backward", "b", "reduction", 2), ("backward", "s", "reduction", 3), ("backward", "h", "parallel", 2),
        ("backward", "h", "parallel", 4), ("backward", "o", "reduction", 2), ("backward", "o", "reduction", 3),
    }  # fmt: skip
    assert all(c.difference < 1e-12 for c in report.checks)
    assert report.blocked == ()


def test_a_report_is_a_table_and_plain_data() -> None:
    report = jscaler.verify_rule(op("n m -> n", lambda x: x.max(1), reduce={"m": "max"}), real(6, 4), parts=(3,))
    assert report.rows()[0] == {
        "direction": "forward", "factor": "n", "size": 6, "kind": "parallel", "parts": 3, "difference": 0.0,
    }  # fmt: skip
    console = Console(width=160)
    with console.capture() as shown:
        console.print(report)
    assert "backward: n m, n -> n m" in shown.get()
    assert "joined by max, which has no derivative in parts" in shown.get()


def test_factors_and_parts_can_be_chosen() -> None:
    project = op("b h, h o -> b o", jnp.matmul)
    report = jscaler.verify_rule(project, real(4, 4), real(4, 4), factors=["h"], parts=(2, 3, 5))
    assert {(c.factor, c.parts) for c in report.checks} == {("h", 2)}
    with pytest.raises(UnknownNameError, match=r"no open factor named 'k' in '.*known: b, h, o"):
        jscaler.verify_rule(project, real(4, 4), real(4, 4), factors=["k"])


def test_nothing_tried_is_an_error() -> None:
    project = op("b h, h o -> b o", jnp.matmul)
    with pytest.raises(VerificationError, match=r"nothing could be tried: of h \(7\), o \(5\), none divides into 2, 3, 4"):
        jscaler.verify_rule(project, real(1, 7), real(7, 5))
    with pytest.raises(CaptureError, match="argument 0 is a shape, give it an array"):
        jscaler.verify_rule(project, jax.ShapeDtypeStruct((2, 2), jnp.float32), real(2, 2))


def test_a_plain_function_is_checked_by_its_derived_rule() -> None:
    report = jscaler.verify_rule(lambda x: jnp.tanh(x).sum(0), real(2, 6))
    assert {(c.direction, c.factor) for c in report.checks} == {(d, f) for d in ("forward", "backward") for f in "ab"}


def test_what_has_no_gradient_is_checked_forward() -> None:
    report = jscaler.verify_rule(op("n m -> n", lambda x: x.argmax(1), blocked="m"), real(4, 3))
    assert {c.direction for c in report.checks} == {"forward"}


def test_a_custom_vjp_is_checked_in_both_modes() -> None:
    @jax.custom_vjp
    def fun(x: Any) -> Any:
        return jnp.sin(x)

    fun.defvjp(lambda x: (jnp.sin(x), (jnp.cos(x), x)), lambda saved, g: (g * saved[0] + saved[1],))
    for rule in (fun, op("... n -> ... n", fun)):
        report = jscaler.verify_rule(rule, real(4, 6), parts=(2,))
        assert [c.direction for c in report.checks] == [
            d for d in ("forward", "backward", "forward, saved", "backward, saved") for _ in "ab"
        ]


@pytest.mark.parametrize(
    ("rule", "fun", "args", "message"),
    [
        (
            "b h, h o -> b o",
            lambda x, k: jnp.tanh(x @ k),
            (real(2, 4), real(4, 3)),
            "with h in 2 parts: result 0 differs",
        ),
        ("n m -> n m", jax.nn.softmax, (real(3, 4),), "with m in 2 parts: result 0 differs by"),
        ("n m -> n m", lambda x: x - x.mean(0), (real(3, 4),), "with n in 3 parts: result 0 differs by"),
        ("n m -> n m", lambda x: jnp.cumsum(x, 1), (real(3, 4),), "with m in 2 parts"),
        ("n m -> n m", lambda x: x[::-1], (real(4, 1),), "with n in 2 parts"),
        ("n -> m", lambda x: x, (real(4),), "m"),
        ("n m -> m n", lambda x: x, (real(4, 4),), r"n in 2 parts: .*shape \(2, 4\), and the rule says \(4, 2\)"),
        (
            "n m, m -> n m",
            lambda x, b: x + b * jnp.arange(4),
            (real(1, 4), real(4)),
            r"fails on parts of shapes \[1, 2\], \[2\] \('m' in 2 parts\)",
        ),
        ("b h, h o, o -> b o", lambda x, k, b: x @ k + b, (real(2, 4), real(4, 3), real(3)), "with h in 2 parts"),
        ("n m -> n, n", lambda x: (x.sum(1), x.max(1)), (real(3, 4),), "with m in 2 parts: result 1 differs by"),
        ("n m -> n m", flawed, (real(3, 4),), "backward: .* with m in 2 parts: result 0 differs by"),
    ],
)
def test_lies(rule: str, fun: Callable[..., Any], args: Any, message: str) -> None:
    lying = op(rule, fun)
    if rule == "n -> m":  # no operand carries m, and no result n: the one is blocked, the other claims to be a sum
        message = "n in 2 parts"
    with pytest.raises(VerificationError, match=message):
        jscaler.verify_rule(lying, *args)


def test_a_bias_that_is_added_once_too_often_is_a_lie_of_the_right_size() -> None:
    biased = op("b h, h o, o -> b o", lambda x, k, b: x @ k + b)
    with pytest.raises(VerificationError, match=r"differs by 3 at \(0, 0\): 11 from parts, 8 as a whole"):
        jscaler.verify_rule(biased, np.full((1, 2), 2.5), np.ones((2, 2)), np.full(2, 3.0), factors=["h"])


def test_compare() -> None:
    a = np.array([1.0, np.nan, np.inf, 0.0])
    assert compare(a, a.copy(), "x") == 0
    with pytest.raises(VerificationError, match=r"x differs by 1e-06 at \(0,\)"):
        compare(a, np.array([1 + 1e-6, np.nan, np.inf, 0.0]), "x")
    for wrong in (
        [1.0, 2.0, np.inf, 0.0],
        [1.0, np.nan, 5.0, 0.0],
        [np.nan, np.nan, np.inf, 0.0],
        [1.0, np.nan, -np.inf, 0.0],
    ):
        with pytest.raises(VerificationError, match="x differs"):
            compare(a, np.array(wrong), "x")
    with pytest.raises(VerificationError, match=r"x is float32\[4\], not float64\[4\]"):
        compare(a, a.astype(np.float32), "x")
    with pytest.raises(VerificationError, match="x differs in 1 of 3 elements"):
        compare(np.array([1, 2, 3]), np.array([1, 2, 4]), "x")
