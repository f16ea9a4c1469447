"""``jscaler.register_rule``: a primitive of the user's own is split as its rule says, and its parameters follow."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import ad, mlir
from parts import fragment, why_blocked

import jscaler
from jscaler import OpRule, RuleError, Split, UnknownNameError, UnknownPrimitiveWarning
from jscaler.lax_primitives import REGISTRY

rng = np.random.default_rng(6)


def primitive(name: str, fun: Callable[..., Any], lowers: bool = True) -> core.Primitive:
    made = core.Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals, **params: jax.typeof(jax.eval_shape(lambda *xs: fun(*xs, **params), *avals)))
    if lowers:
        mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    return made


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Rules of a test's own primitives go with it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def scaled(x: Any, y: Any) -> Any:
    return x * 2 + y


def test_without_a_rule_it_replicates_with_a_warning_and_with_one_it_splits() -> None:
    scale_p = primitive("scale_and_add", scaled, lowers=False)  # so that Shardy cannot be asked either
    with pytest.warns(UnknownPrimitiveWarning, match="'scale_and_add'"):
        assert fragment(scale_p.bind, jnp.ones((2, 3)), jnp.ones((2, 3))).open == {}
    jscaler.register_rule(scale_p, "..., ... -> ...")
    for shape in ((), (2,), (2, 3), (2, 1, 3)):
        made = fragment(scale_p.bind, jnp.ones(shape), jnp.ones(shape))
        assert sorted(made.open.values()) == sorted(n for n in shape if n > 1)


@pytest.mark.parametrize(
    ("fun", "rule", "keywords", "shapes", "kinds"),
    [
        (lambda x: x - x.mean(-1, keepdims=True), "... n -> ... n", {"blocked": "n"}, [(2, 4)], ["parallel", "blocked"]),
        (lambda x, y: jnp.einsum("ij,jk->ki", x, y), "i j, j k -> k i", {}, [(2, 4), (4, 3)], ["parallel", "reduction"]),
        (lambda x: x.max(1), "i j -> i", {"reduce": {"j": "max"}}, [(2, 4)], ["parallel", "reduction"]),
        (lambda x: x.min(1), "i j -> i", {"reduce": {"j": "min"}}, [(2, 4)], ["parallel", "reduction"]),
        (lambda x: x.reshape(x.shape[0], -1), "i j k -> i (j k)", {}, [(2, 4, 3)], ["parallel", "parallel", "parallel"]),
    ],
)
def test_rules_of_many_kinds(fun: Any, rule: str, keywords: Any, shapes: Any, kinds: list[str]) -> None:
    own_p = primitive("of_many_kinds", fun)
    jscaler.register_rule(own_p, rule, **keywords)
    args = [rng.normal(size=s).astype(np.float32) for s in shapes]
    made = fragment(own_p.bind, *args)
    assert [f.kind for f in made.rule.factors.values()][: len(kinds)] == kinds
    ad.primitive_jvps[own_p] = lambda xs, ts: jax.jvp(fun, tuple(xs), tuple(map(ad.instantiate_zeros, ts)))
    report = jscaler.verify_rule(own_p, *args)
    assert {c.direction for c in report.checks} == {"forward", "backward"}


def test_a_lie_is_found() -> None:
    norm_p = primitive("normalise", lambda x: x / x.sum(-1, keepdims=True))
    jscaler.register_rule(norm_p, "... n -> ... n")
    with pytest.raises(jscaler.VerificationError, match=r"normalise, forward: .* with b in 2 parts: result 0 differs"):
        jscaler.verify_rule(norm_p, np.ones((3, 4), np.float32))


def fill(x: Any, *, width: int) -> Any:
    return jnp.broadcast_to(x[:, None], (*x.shape, width))


def test_parameters_at_part_shapes() -> None:
    fill_p = primitive("fill_out", fill)
    rule = OpRule("n, n w -> n w")
    jscaler.register_rule(
        fill_p, lambda eqn: rule if len(eqn.invars) == 2 else "n -> n w",
        local=lambda params, operands, results: {"width": results[0].shape[1]},
    )  # fmt: skip
    made = fragment(lambda x: fill_p.bind(x, width=4), np.ones(6, np.float32))
    assert made.open == {"a": 6}  # the function cannot know where along w a part lies: nothing that it reads says so
    assert "no operand carries it" in made.rule.factors["b"].reason
    jaxpr = made.local({"a": 3})
    assert jaxpr.outvars[0].aval.shape == (2, 4)


def test_without_local_a_part_of_a_wrong_shape_is_an_error() -> None:
    tile_p = primitive("tile_rows", lambda x, *, rows: jnp.resize(x, (rows, x.shape[1])))
    jscaler.register_rule(tile_p, "n m -> n m")
    made = fragment(lambda x: tile_p.bind(x, rows=6), np.ones((6, 2), np.float32))
    with pytest.raises(
        RuleError, match=r"result 0 of a part of 'tile_rows' has shape \(6, 2\), and the rule says \(3, 2\)"
    ):
        made.local({"a": 2})
    jscaler.register_rule(tile_p, "n m -> n m", local=lambda p, ins, outs: {"rows": outs[0].shape[0]})
    report = jscaler.verify_rule(lambda x: tile_p.bind(x, rows=6), np.arange(12, dtype=np.float32).reshape(6, 2))
    assert len(report.checks) == 3
    assert report.blocked == (("backward", "", "Differentiation rule for 'tile_rows' not implemented"),)


def test_shares_pass_what_is_said_to_be_linear() -> None:
    half_p = primitive("half", lambda x: x / 2)
    jscaler.register_rule(half_p, "... -> ...")
    total = fragment(lambda x: half_p.bind(x.sum(0)), np.ones((4, 3), np.float32))
    assert why_blocked(total, 0, 0) == "a partial add of it meets 'half'"
    jscaler.register_rule(half_p, "... -> ...", linear="each")
    assert fragment(lambda x: half_p.bind(x.sum(0)), np.ones((4, 3), np.float32)).open == {"a": 4, "b": 3}


def test_a_user_s_rule_goes_before_the_table_s() -> None:
    before = fragment(jnp.sin, np.ones((4, 3), np.float32))
    assert before.open == {"a": 4, "b": 3}
    jscaler.register_rule(jax.lax.sin_p, "n m -> n m", blocked="n")
    assert fragment(jnp.sin, np.ones((4, 3), np.float32)).open == {"b": 3}


def test_a_step_with_such_a_primitive_is_split() -> None:
    scale_p = primitive("scale", scaled)
    jscaler.register_rule(scale_p, "... n, ... n -> ... n")

    def step(x: Any, y: Any) -> Any:
        return scale_p.bind(x, y)

    def split(graph: Any, devices: np.ndarray) -> None:
        (op,) = graph.ops
        graph.op_assign(graph.op_trans(op, Split("a", 2)), devices)

    x, y = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(jscaler.parallelize(split, devices=2)(step)(x, y), scaled(x, y), rtol=1e-6)


def test_what_cannot_be_registered() -> None:
    own_p = primitive("own", jnp.sin)
    with pytest.raises(TypeError, match="takes a primitive, not <PjitFunction"):
        jscaler.register_rule(jnp.sin, "... -> ...")  # type: ignore[arg-type]
    jit_p = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns[0].primitive
    with pytest.raises(TypeError, match="is opened, and what it calls is asked for rules"):
        jscaler.register_rule(jit_p, "... -> ...")
    with pytest.raises(RuleError, match="needs one '->'"):
        jscaler.register_rule(own_p, "n")
    with pytest.raises(UnknownNameError, match="no factor named 'k'"):
        jscaler.register_rule(own_p, "n -> n", blocked="k")
    with pytest.raises(TypeError, match="returns an OpRule"):
        jscaler.register_rule(own_p, lambda eqn: "n -> n", blocked="n")
    jscaler.register_rule(own_p, "n m -> n m")
    with pytest.raises(RuleError, match=r"'own': operand 0 has shape \(3,\), 1 dims, and the rule names 2"):
        fragment(own_p.bind, np.ones(3, np.float32))
