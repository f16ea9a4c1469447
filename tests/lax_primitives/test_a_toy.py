"""Adding a primitive is one record: two toys, of which all that jscaler knows stands here, are planned and verified."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import ad, mlir

import jscaler
from jscaler import Split, UnknownPrimitiveWarning
from jscaler.capture.names import function_name
from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask
from jscaler.lax_primitives import REGISTRY, Primitive
from jscaler.lax_primitives.reductions import reduce
from jscaler.lax_primitives.spec import Spec, dims
from jscaler.primitives.plan import Trans
from jscaler.verification.frames import Frame
from jscaler.verification.interpret import Interpreter
from jscaler.verification.local_programs import trace_local
from jscaler.verification.symbols import Patterns
from jscaler.xla_model.work import work_of
from tests.rules.parts import fragment, why_blocked

rng = np.random.default_rng(5)


def primitive(fun: Any) -> core.Primitive:
    made = core.Primitive(fun.__name__)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals, **params: jax.typeof(jax.eval_shape(lambda *xs: fun(*xs, **params), *avals)))
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    ad.primitive_jvps[made] = lambda xs, ts, **params: jax.jvp(
        lambda *ys: fun(*ys, **params), tuple(xs), tuple(map(ad.instantiate_zeros, ts))
    )
    return made


def square_sums(x: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """The sums of squares over ``axes``; ``sizes`` are those of the result."""
    return (x * x).sum(axes).reshape(sizes)


def rows_and_columns(x: Any) -> Any:
    """A transpose by another name."""
    return x.T


def swapped(eqn: core.JaxprEqn) -> Spec:
    rows = dims(eqn.invars[0].aval.shape, (0, 1))
    return Spec((rows,), (rows[::-1],), linear="move")


SUMS_P, TURN_P = primitive(square_sums), primitive(rows_and_columns)
SUMS = Primitive(
    "square_sums",
    reduce("add"),
    shaped=lambda part, eqn: {"sizes": part.shape(eqn.outvars[0])},
    role="reduces",
    weight=95,
    word="squares",
    cost="reduced",
    combiner="add",
)
TURN = Primitive("rows_and_columns", swapped, role="moves", zero="any", cost="fused", seen="moves")


@pytest.fixture
def known() -> Iterator[None]:
    """The toys' records, for one test."""
    jscaler.register_rule(SUMS_P, SUMS)
    jscaler.register_rule(TURN_P, TURN)
    yield
    del REGISTRY[SUMS_P], REGISTRY[TURN_P]


def squares(x: Any, axis: int) -> Any:
    return SUMS_P.bind(x, axes=(axis,), sizes=(x.shape[1 - axis],))


def step(x: Any, w: Any) -> Any:
    vg = jscaler.value_and_grad(lambda w: squares(TURN_P.bind(jnp.tanh(x @ w)), 1).sum())
    return vg(w)


def by_batch(graph: Any, devices: np.ndarray) -> None:
    """Every op is split along the batch: for the sums of squares it is what they sum up."""
    for op in graph.ops:
        factor = graph.factor_of("x", 0).get(op)
        if factor is not None and graph.rule(op).factors[factor].splittable:
            graph.op_assign(graph.op_trans(op, Split(factor, 2)), devices)


def test_without_a_record_nothing_of_it_is_split() -> None:
    with pytest.warns(UnknownPrimitiveWarning, match="'square_sums'"):  # Shardy cannot know what its sizes are
        made = fragment(lambda x: squares(x, 1), np.ones((4, 6), np.float32))
    assert not made.open


@pytest.mark.usefixtures("known")
def test_its_dims_sums_and_shapes() -> None:
    made = fragment(lambda x: squares(x, 1), np.ones((4, 6), np.float32))
    assert str(made.rule) == "a b -> a"
    assert {name: made.rule.factors[name].kind for name in made.open} == {"a": "parallel", "b": "reduction"}
    assert made.local({"a": 2}).outvars[0].aval.shape == (2,)  # whose parameter says so
    turned = fragment(lambda x: squares(TURN_P.bind(x.sum(0)), 0), np.ones((5, 4, 6), np.float32))
    assert why_blocked(turned, 0, 0) == "a partial add of it meets 'square_sums'"  # a move lets it pass


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_make_the_whole(axis: int) -> None:
    x = rng.normal(size=(4, 6)).astype(np.float32)
    report = jscaler.verify_rule(lambda x: squares(TURN_P.bind(x), axis), x)
    assert {(c.direction, c.parts) for c in report.checks} >= {("forward", 2), ("backward", 2)}


@pytest.mark.usefixtures("known")
def test_a_plan_splits_it_and_the_numbers_are_right() -> None:
    x, w = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    made = jscaler.parallelize(by_batch, devices=2)(step)
    loss, gradient = made(x, w)
    expected, wanted = jax.jit(jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).sum()))(w)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)
    lowered = made.lower(x, w)
    split = [d.op for d in lowered.plan.plan.decisions if isinstance(d, Trans)]
    assert any("squares" in path for path in split), split
    jscaler.verify(lowered)


@pytest.mark.usefixtures("known")
def test_its_word_and_its_cost() -> None:
    jaxpr = jax.make_jaxpr(lambda x: squares(jnp.exp(TURN_P.bind(x)), 1))(jnp.ones((64, 32))).jaxpr
    assert function_name(jaxpr.eqns) == "squares"
    work = work_of(jaxpr)  # one kernel: what is fused into the sum is not stored
    assert (work.launches, work.read, work.written) == (1, 64 * 32 * 4, 32 * 4)


def test_the_verifier_sees_it_as_a_move(known: None) -> None:
    masks = [Mask(((4,), (6,)), (((2 * i, 2 * i + 2),), ((0, 6),))) for i in range(2)]
    frame = Frame(masks)
    local = trace_local(TURN_P.bind, {"a": 2}, [jax.ShapeDtypeStruct(frame.shape, jnp.float32)])
    patterns = Patterns((4, 6))
    (cells,) = Interpreter({"a": 2}, patterns).run(local.jaxpr, local.bind([patterns.held(frame)], lambda x: x))
    np.testing.assert_array_equal(cells.element, np.arange(24).reshape(2, 2, 6).transpose(0, 2, 1))
    REGISTRY[TURN_P] = Primitive("rows_and_columns")
    with pytest.raises(VerificationError, match="works on data under way"):
        Interpreter({"a": 2}, patterns).run(local.jaxpr, local.bind([patterns.held(frame)], lambda x: x))
