"""A finished plan meets a graph that its policy never saw: it fits, or the first difference is named."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Chunk, Plan, PlanFitError, Prefix, Split, plans
from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Place
from jscaler.primitives import Assign, Fuse, GridAxis, OnDevices, Order, Trans, make_plan
from jscaler.primitives.plan import ReduceDtype, SaveResiduals, Shard, Store
from jscaler.primitives.plan_matches import check_fits
from jscaler.stages import transform
from tests.lower.steps import ADAMW, MOMENTUM, make_batch, make_state, make_step, split, tensor_parallel
from tests.plans.plan_steps import captured_once, gpt, mlp


def graph_of(
    names: tuple[str, ...] = ("up", "down"), hidden: int = 16, before: Callable[..., Any] = jnp.tanh, end: Any = jnp.sin
) -> Graph:
    """The graph of layers of these names, a dot each; ``before`` is part of the first, ``end`` of the loss."""
    params = {n: jnp.ones((8, hidden) if i % 2 == 0 else (hidden, 8)) for i, n in enumerate(names)}

    def step(params: dict[str, Any], batch: jax.Array) -> Any:
        def loss(params: dict[str, Any]) -> jax.Array:
            x = batch
            for name in names:
                with jax.named_scope(name):
                    x = (before(x) if name == names[0] else x) @ params[name]
            with jax.named_scope("end"):
                return end(x).sum()

        return jscaler.grad(loss)(params)

    return jscaler.parallelize("single", devices=1)(step).graph(params, jnp.ones((4, 8)))


def two_way(graph: Any, devices: np.ndarray) -> None:
    split(graph, "up/dot", ("up", 1), devices)
    split(graph, "down/dot", ("down", 0), devices)


def made(policy: Callable[..., None] = two_way, graph: Graph | None = None) -> Plan:
    """A plan for four devices, as a file hands it on."""
    return Plan.from_json(make_plan(policy, graph or graph_of(), 4).to_json())


def difference(plan: Plan, graph: Graph) -> str:
    with pytest.raises(PlanFitError) as error:
        check_fits(plan, graph, BodyTable())
    found = str(error.value)
    start = f"plan '{plan.name}' does not fit this graph; the first difference: "
    assert found.startswith(start)
    return found[len(start) :]


def test_it_fits_its_own_graph_and_one_of_other_sizes() -> None:
    check_fits(made(), graph_of(), BodyTable())
    check_fits(made(), graph_of(hidden=32), BodyTable())
    check_fits(made(), graph_of(before=jnp.cos), BodyTable())


def test_sizes_must_divide() -> None:
    found = difference(made(), graph_of(hidden=18))
    assert found == "'up/dot' cannot split factor 'c' of size 18 into 4 parts; legal: 1, 2, 3, 6, 9, 18; or unequal " + (
        "parts by sizes, like Split('c', sizes=(5, 5, 4, 4))"
    )


def test_a_missing_op_is_named_with_a_near_one() -> None:
    found = difference(made(), graph_of(("upper", "down")))
    assert found.startswith(
        "op 'up/dot' is not in the graph; did you mean 'upper/dot'?; 1 of the plan's ops are missing, 1 forward"
    )


def test_the_first_op_that_was_not_there_is_named() -> None:
    graph = graph_of(("up", "down", "more", "last"))
    found = difference(made(), graph)
    assert found.startswith(
        "op 'more/dot' is in the graph and was not in the one that the plan was made for; 0 of the plan's ops are missing"
    )
    assert "made_for=None" in found
    check_fits(dataclasses.replace(made(), made_for=None), graph, BodyTable())


def test_a_factor_that_is_missing_or_of_another_kind_is_named() -> None:
    plan = made()
    assert plan.made_for is not None
    records = {op.path: op for op in plan.made_for.ops}

    def with_rule(text: str, *factors: tuple[str, int, str]) -> Plan:
        assert plan.made_for is not None
        rule = dataclasses.replace(records["up/dot"].rule, text=text, factors=factors)  # type: ignore[type-var]
        ops = (dataclasses.replace(records["up/dot"], rule=rule), *plan.made_for.ops[1:])
        return dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, ops=ops))

    a, b, c = ("a", 4, "parallel"), ("b", 8, "reduction"), ("c", 16, "parallel")
    found = difference(with_rule("a d, d c -> a c", a, ("d", 8, "reduction"), c), graph_of())
    assert found == (
        "op 'up/dot' has no factor 'd': its rule is 'a b, b c -> a c; a 4, b 8 reduction, c 16' here, and was "
        "'a d, d c -> a c; a 4, d 8 reduction, c 16'"
    )
    found = difference(with_rule("a b, b c -> a c", a, ("b", 8, "blocked"), c), graph_of())
    assert found == "factor 'b' of op 'up/dot' is reduction here, and was blocked"
    found = difference(with_rule("a b, c b -> a c", a, b, c), graph_of())
    assert found.startswith("the rule of op 'up/dot' is 'a b, b c -> a c;")


def test_a_factor_that_is_blocked_now_says_why() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "up/dot", ("up", 0), devices)

    found = difference(made(policy), graph_of(before=lambda x: jax.lax.sort(x, dimension=1)))
    assert found.startswith("factor 'b' of op 'up/dot' is blocked here (")
    assert "it is sorted" in found


def test_ops_of_every_kind_of_decision_are_looked_up() -> None:
    graph = graph_of()
    for decision in (
        Order("up/dot", "dawn/dot"),
        SaveResiduals("dawn/dot", "saved"),
        Trans("dawn/dot", ()),
        Fuse(("up/dot", "dawn/dot"), "both"),
    ):
        found = difference(Plan("mine", 4, (decision,)), graph)
        assert found.startswith("op 'dawn/dot' is not in the graph; did you mean 'down/dot'?")
        assert found.endswith(f"'{decision}' names it")


FOUR = tuple(map(Place, range(4)))
GRID = Trans("up/dot", (GridAxis("c", 2), GridAxis(None, 2)))


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ((Assign("up/dot", (), FOUR[:1]),), "'up/dot' is assigned to devices before it is split"),
        ((GRID, Assign("up/dot", ((0, 4),), FOUR)), r"the cells \[\[0, 4\]\] of 'up/dot' are none of its grid \[2, 2\]"),
        ((GRID, Assign("up/dot", ((0, 2), (0, 3)), FOUR)), "are none of its grid"),
        ((GRID, Assign("up/dot", ((0, 2), (0, 2)), FOUR[:3])), "4 cells of 'up/dot' are assigned to 3 places"),
        ((GRID, Assign("up/dot", ((0, 2), (0, 2)), (*FOUR[:3], Place(7)))), "'up/dot' is assigned to devices '7' of 4"),
        ((Trans("up/dot", (GridAxis(None, 0),)),), "'up/dot' is copied 0 times"),
        ((Trans("up/dot", (GridAxis("x", 2),)),), "no factor named 'x' in op 'up/dot'"),
        ((Trans("up/dot", (), (GridAxis(None, 2),)),), "'up/dot' runs in chunks of no factor"),
        (
            (GRID, Trans("up/dot", (GridAxis("a", 2),))),
            r"'up/dot' is split into \['c:2', 'copy:2'\] before, and 'op_trans ",
        ),
        ((ReduceDtype("foo"),), "reduce_dtype is a floating dtype like 'bfloat16', not 'foo'"),
        ((SaveResiduals("up/dot@backward", "saved"),), "'up/dot@backward' is a backward op without a backward"),
        (
            (Shard("params/up", 0, 4, (0, 1, 2, 3)), Shard("params/up", 1, 4, (0, 1, 2, 3))),
            "of 'params/up' two things are said: 'shard ",
        ),
        (
            (Store("batch", (2,), (0, 1), ((0,), ())), Store("batch", (2,), (0, 1), ((), (0,)))),
            "of 'batch' two things are said: 'store ",
        ),
        ((Trans("up/dot", (), (GridAxis("c", 5),)),), "cannot split factor 'c' of size 16 into 5 parts"),
        ((Trans("up/dot", (GridAxis("c", 2, (9, 9)),)),), r"the sizes \[9, 9\] add up to 18"),
    ],
)
def test_decisions_that_say_nothing_are_refused(decisions: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanFitError, match=message):
        check_fits(Plan("mine", 4, decisions), graph_of(), BodyTable())


def test_fused_and_chunked_ops_and_algorithms_are_found_again() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph.fuse("up/dot", "down/dot", name="both")
        graph.op_assign(graph.op_trans(op, Split("a", 4), Chunk("c", 2)), devices)
        graph.op_assign(graph.op_trans("end/cumsum", Prefix("b", 4)), devices)

    plan = made(policy, graph_of(end=lambda x: jnp.cumsum(x, 1)))
    assert plan.made_for is not None
    assert [op.path for op in plan.made_for.ops] == ["both", "end/cumsum"]
    check_fits(plan, graph_of(end=lambda x: jnp.cumsum(x * 2, 1)), BodyTable())
    found = difference(plan, graph_of(("up", "dawn"), end=lambda x: jnp.cumsum(x, 1)))
    assert found.startswith("op 'down/dot' is not in the graph; did you mean 'dawn/dot'?; 'fuse ")


def test_a_plan_of_forward_ops_serves_another_optimizer() -> None:
    saved = jscaler.parallelize(tensor_parallel, devices=4)(make_step()).lower(make_state(MOMENTUM), make_batch())
    plan = Plan.from_json(saved.plan.plan.to_json())
    lowered = jscaler.parallelize(plan, devices=4)(make_step(tx=ADAMW)).lower(make_state(ADAMW), make_batch())
    afresh = jscaler.parallelize(tensor_parallel, devices=4)(make_step(tx=ADAMW)).lower(make_state(ADAMW), make_batch())
    assert lowered.as_text() == afresh.as_text()


def test_shards_of_parameters_are_compared_with_the_inputs() -> None:
    def sharded(leaf: str, dim: int, parts: int, devices: tuple[int, ...] = (0, 1, 2, 3)) -> Plan:
        return Plan.from_json(Plan("mine", 4, (Shard(leaf, dim, parts, devices),)).to_json())

    check_fits(sharded("params/up", 1, 4), graph_of(), BodyTable())
    cases = (
        (sharded("params/upp", 1, 4), "no input named 'params/upp'; did you mean 'params/up'"),
        (sharded("batch", 0, 4), "'batch' is no parameter"),
        (sharded("params/up", 2, 4), "'params/up' of shape (8, 16) has no dim 2"),
        (sharded("params/up", 1, 3), "'params/up' is sharded over devices"),
        (sharded("params/up", 1, 2, (0, 1)), "'params/up' is sharded over devices"),
    )
    for plan, message in cases:
        assert difference(plan, graph_of()).startswith(message)
    assert "cannot split factor 'dim 1' of size 18 into 4" in difference(sharded("params/up", 1, 4), graph_of(hidden=18))


@pytest.mark.parametrize(
    ("leaf", "grid", "devices", "cuts", "message"),
    [
        ("batsh", (4,), (0, 1, 2, 3), ((0,), ()), "no input named 'batsh'; did you mean 'batch'"),
        ("batch", (4,), (0, 1, 2, 3), ((0,),), "'batch' of shape (4, 8) is stored as a tensor of 1 dims"),
        ("batch", (4,), (0, 1, 2, 9), ((0,), ()), "'batch' is stored on a grid [4] of devices [0, 1, 2, 9]: give as many"),
        ("batch", (4,), (0, 1, 2, 2), ((0,), ()), "'batch' is stored on a grid [4] of devices [0, 1, 2, 2]"),
        ("batch", (3,), (0, 1, 2, 3), ((0,), ()), "'batch' is stored on a grid [3] of devices [0, 1, 2, 3]"),
        ("batch", (4,), (0, 1, 2, 3), ((3,), ()), "'batch' is cut by the axes [[3], []] of a grid of 1"),
        ("batch", (2, 2), (0, 1, 2, 3), ((-1,), ()), "'batch' is cut by the axes [[-1], []] of a grid of 2"),
        ("batch", (2, 2), (0, 1, 2, 3), ((1,), (0, 1)), "'batch' is cut by the axes [[1], [0, 1]]"),
        ("params/up", (4,), (0, 1, 2, 3), ((), (0,)), "'params/up' cannot split factor 'dim 1' of size 18 into 4 parts"),
    ],
)
def test_inputs_that_are_stored_are_compared_with_the_graph(
    leaf: str, grid: tuple[int, ...], devices: tuple[int, ...], cuts: Any, message: str
) -> None:
    plan = Plan("mine", 4, (Store(leaf, grid, devices, cuts),))
    assert difference(Plan.from_json(plan.to_json()), graph_of(hidden=18)).startswith(message)


def test_inputs_are_stored_on_any_grid_of_the_devices() -> None:
    stores = (Store("batch", (2, 2), (3, 1, 2, 0), ((1,), (0,))), Store("params/up", (), (2,), ((), ())))
    check_fits(Plan("mine", 4, stores), graph_of(), BodyTable())


INNER = (
    "single()", "data_parallel()", "tensor_parallel()", "sequence_parallel()", "vocab_parallel()", "zero1()", "zero2()",
    "zero3()", "megatron(dp=2, tp=1, zero=1)", "megatron(dp=1, tp=2, sequence=True, zero=3)", "co_shard(2, plan=zero2())",
    "recompute_layers(zero3())", "selective_recompute(tensor_parallel())",
)  # fmt: skip
AROUND = (
    "{}", "accumulate(2, {})", "pipeline(2, 4, plan={})", "pipeline(2, 4, 'interleaved', plan={})",
    "pipeline(2, 4, 'chimera', plan={})", "pipeline(2, 4, '1f1b+R', plan={})", "interlaced(2, 4, {})",
)  # fmt: skip


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("stacked", [False, True])
def test_saved_plans_fit_the_graph_that_they_were_made_for(around: str, stacked: bool) -> None:
    step, arguments = gpt(layers=4, stacked=stacked)
    captured, fitted = captured_once(step, *arguments), 0
    for inner in INNER:
        try:
            plan = transform(captured, plans.by_name(around.format(inner)), 4)
        except jscaler.PlanError:  # these two do not go together
            continue
        check_fits(Plan.from_json(plan.to_json()), captured.graph, captured.bodies)
        fitted += 1
    assert fitted >= 10


def test_a_saved_pipeline_with_zero_inside_lowers_to_the_same_program() -> None:
    step, arguments = mlp()
    first = jscaler.parallelize(plans.pipeline(2, 2, plan=plans.zero3()), devices=4)(step).lower(*arguments)
    again = jscaler.parallelize(Plan.from_json(first.plan.plan.to_json()))(step).lower(*arguments)
    assert again.as_text() == first.as_text()


STAGE = OnDevices(("up/dot",), (0, 1), stage=0)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ((STAGE, Shard("params/up", 0, 2, (1, 2))), "devices [1, 2]: give an array of all 4, or of all that a stage has"),
        ((STAGE, Shard("params/up", 0, 2, (0, 0, 1, 1))), "over devices [0, 0, 1, 1]"),
        ((dataclasses.replace(STAGE, devices=(0, 9)),), "ops are to run on devices [0, 9]"),
        ((dataclasses.replace(STAGE, devices=()),), "ops are to run on devices []"),
        ((dataclasses.replace(STAGE, turned=(2, 2)),), "ops are to run on devices [2, 2]"),
        ((dataclasses.replace(STAGE, stage=-1),), "a stage is a number, 0 or more, and not -1"),
        ((GRID, Order("up/dot", "up/dot", ((0, 1), (5, 6)))), "the cells [[0, 1], [5, 6]] of 'up/dot' are none of"),
        ((Order("up/dot", "up/dot", ((0, 1),)),), "the cells [[0, 1]] of 'up/dot' are none of its grid []"),
        (
            (Trans("up/dot", ()), Assign("up/dot", (), FOUR[:1]), Trans("up/dot", (GridAxis("c", 2),))),
            "'up/dot' is split after it was assigned to devices",
        ),
    ],
)
def test_stages_and_orders_are_compared_with_devices_and_grids(decisions: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanFitError, match=re.escape(message)):
        check_fits(Plan("mine", 4, decisions), graph_of(), BodyTable())
    check_fits(Plan("mine", 4, (STAGE, Shard("params/up", 0, 2, (1, 0)))), graph_of(), BodyTable())


def test_the_number_of_devices_is_compared_first() -> None:
    with pytest.raises(jscaler.DeviceError, match=r"is for 4 devices, and 2 are given; give it as many \(devices=4\)"):
        jscaler.parallelize(made(), devices=2)(make_step()).lower(make_state(MOMENTUM), make_batch())


def test_a_plan_brings_its_number_of_devices() -> None:
    saved = jscaler.parallelize(tensor_parallel, devices=4)(make_step()).lower(make_state(MOMENTUM), make_batch())
    lowered = jscaler.parallelize(saved.plan.plan)(make_step()).lower(make_state(MOMENTUM), make_batch())
    assert len(lowered.devices) == 4
    assert lowered.as_text() == saved.as_text()
