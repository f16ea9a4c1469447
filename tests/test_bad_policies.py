"""What a policy says with arguments of wrong kinds, what it returns, and what is said when it is over."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_bad_inputs import lowered, pattern

import jscaler
from jscaler import Plan, Replicate, Split, TimeSplit, plans
from jscaler.errors import JscalerError, OrderError, PlanError, UnknownNameError
from jscaler.ir import Place

OTHER = jscaler.parallelize("single", devices=1)(lambda x: jnp.max(x)).graph(jnp.ones((4, 4)))
OPS = ("loss/dot", "loss/dot.1")
FIVE: Any = 5
FOUR: Any = np.float32(4)
HALF: Any = 0.5


def split_again(graph: Any, devices: np.ndarray) -> None:
    rows = graph.op_trans("loss/dot", Split("a", 2))
    graph.op_assign(rows, devices[:2])
    graph.op_trans(rows, Split("b", 2))


Case = tuple[Callable[[Any, np.ndarray], Any], type[JscalerError], str]
POLICIES: dict[str, Case] = {
    "parts as a float": (
        lambda g, d: g.op_trans("loss/dot", Split("a", FOUR)),
        PlanError,
        "'loss/dot': the number of parts is a positive whole number, not np.float32(4.0)",
    ),
    "a size": (lambda g, d: g.op_trans("loss/dot", Split("a", sizes=FIVE)), PlanError, "positive whole numbers, not 5"),
    "algorithms in a list": (lambda g, d: g.op_trans("loss/dot", [Split("a", 2)]), PlanError, "is no algorithm; give Spli"),
    "a class": (lambda g, d: g.op_trans("loss/dot", Split), PlanError, "is no algorithm; give Split('a', 2)"),
    "ops in a tuple": (lambda g, d: g.op_trans(g.select("loss/*"), Split("a", 2)), PlanError, "such as 'loss/dot', not (O"),
    "another graph's op": (lambda g, d: g.op_assign(OTHER.ops[0], 0), UnknownNameError, "no op named 'loss/reduce_max'; d"),
    "part of a grid": (
        lambda g, d: g.op_trans(g.op_trans("loss/dot", Split("a", 4))[0], Split("b", 2)),
        PlanError,
        "is part of a grid: cells that are split differently from their neighbours need their own ops",
    ),
    "a cell in words": (lambda g, d: g.op_trans("loss/dot", Split("a", 4))["a"], PlanError, "'loss/dot': cell 'a' of grid"),
    "every second cell": (lambda g, d: g.op_trans("loss/dot", Split("a", 4))[::2], PlanError, "is empty or has a step; ax"),
    "two axes of one": (lambda g, d: g.op_trans("loss/dot", Split("a", 4))[0, 0], PlanError, "2 indices for a grid of 1 a"),
    "two axes of one name": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", TimeSplit("a", 2, "t"), TimeSplit("b", 2, "t")), 0),
        PlanError,
        "'loss/dot' has two time axes that are called 't', of 2 and 2 parts; give each a name of its own, or",
    ),
    "an axis of two lengths": (
        lambda g, d: [g.op_assign(g.op_trans(o, TimeSplit("a", n, "t")), 0) for o, n in zip(OPS, (2, 4), strict=True)],
        PlanError,
        "the time axis 't' has 2 parts of 'a' in 'loss/dot' and 4 parts of 'a' in 'loss/dot.1'",
    ),
    "half a device": (lambda g, d: g.op_assign("loss/dot", 0.5), PlanError, "a device is a whole number or a Place, not n"),
    "half a place": (lambda g, d: g.op_assign("loss/dot", Place(HALF)), PlanError, "a whole number or a Place, not Place("),
    "rows of two lengths": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 2)), [[0], [1, 2]]),
        PlanError,
        "op_assign takes an array of devices, whose rows are of one length, not [[0], [1, 2]]",
    ),
    "a turned array": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 2), Split("b", 4)), d.reshape(4, 2)),
        PlanError,
        "has shape (2, 4) and its devices have shape (4, 2)",
    ),
    "one device for copies": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Replicate(2)), [0, 0]),
        PlanError,
        "'loss/dot' has 2 cells on 1 devices",
    ),
    "no device at all": (lambda g, d: g.op_assign("loss/dot", []), PlanError, "has 1 cells and is assigned to 0 devices:"),
    "assigned twice": (
        lambda g, d: [g.op_assign("loss/dot", device) for device in (0, 1)],
        PlanError,
        "'loss/dot' is Grid(loss/dot []): assign that grid or its cells, once each",
    ),
    "before itself": (lambda g, d: g.op_order("loss/dot", "loss/dot"), OrderError, "the order is cyclic: loss/dot < loss/"),
    "there and back": (
        lambda g, d: [g.op_order(*pair) for pair in (("loss/dot", "loss/dot.1"), ("loss/dot.1", "loss/dot"))],
        OrderError,
        "drop one of the op_order calls",
    ),
    "order of a truth": (lambda g, d: g.op_order(("loss/dot", True), "loss/dot.1"), PlanError, "the number of a part, not"),
    "a pattern in a list": (lambda g, d: g.select(["loss/*"]), PlanError, "such as 'block_*/mlp/*', not ['loss/*']"),
    "a pattern that is a number": (lambda g, d: g.select_inputs(3), PlanError, "select_inputs takes a path or a shell pat"),
    "a misspelt selection": (lambda g, d: g.select("lss/*"), UnknownNameError, "no op named 'lss/*'; did you mean"),
    "another kind of op": (lambda g, d: g.of_kind("fwd"), UnknownNameError, "no kind of op named ''fwd''; did you mean"),
    "an op by its number": (lambda g, d: g[3], UnknownNameError, "no op named '3'; known: loss/dot"),
    "an input by its number": (lambda g, d: g.input(0), UnknownNameError, "no input named '0'; known: params/a, params/b"),
    "a dim in words": (lambda g, d: g.factor_of("params/a", "0"), PlanError, "'params/a' of shape (8, 16) has no dim '0'"),
    "a dim from the end": (lambda g, d: g.factor_of("params/a", -1), PlanError, "of shape (8, 16) has no dim -1"),
    "half a dim": (lambda g, d: g.shard("params/a", 0.5, d), PlanError, "'params/a' of shape (8, 16) has no dim 0.5"),
    "no leaf": (lambda g, d: g.shard(None, 0, d), UnknownNameError, "no input named 'None'; known: params/a"),
    "data sharded": (lambda g, d: g.shard("batch", 0, d), PlanError, "'batch' is no parameter: no gradient is taken"),
    "sharded over floats": (lambda g, d: g.shard("params/a", 0, d / 2), PlanError, "shard takes the numbers of devices, 0"),
    "sharded over some": (lambda g, d: g.shard("params/a", 0, d[:4]), PlanError, "give an array of all 8, each once, whos"),
    "sharded twice": (lambda g, d: [g.shard("params/a", dim, d) for dim in (0, 1)], PlanError, "'params/a' was sharded be"),
    "a schedule of a number": (lambda g, d: g.schedule(5), PlanError, "a schedule is a name, a Table, its text, or a file"),
    "a schedule of no micro-batches": (
        lambda g, d: g.schedule("1f1b"),
        PlanError,
        "'1f1b' is the order of micro-batches on groups of devices, and no op of 'policy' runs in several: cut",
    ),
    "a dtype of whole numbers": (lambda g, d: g.reduce_dtype("int32"), PlanError, "a floating dtype like 'bfloat16', not"),
    "yes": (lambda g, d: g.accumulation(each_time="no"), PlanError, "accumulation: each_time is True or False, not 'no'"),
    "no micro-batches": (lambda g, d: g.per_microbatch(None), PlanError, "per_microbatch takes ops, grids and patterns, n"),
    "keeping a number": (lambda g, d: g.recompute("loss/*", keep=5), PlanError, "takes ops, grids, paths and patterns, no"),
    "recomputing no op": (lambda g, d: g.recompute([]), PlanError, "recompute takes one op or more; none was given"),
    "residuals of nothing": (lambda g, d: g.residuals(None, "saved"), PlanError, "residuals takes an op or the path of on"),
    "residuals of an update": (lambda g, d: g.residuals(g.update()[0], "saved"), PlanError, "is a update op without a bac"),
    "a loop by its number": (lambda g, d: g.ranges(0, [1]), PlanError, "ranges takes the name of a loop, of those in grap"),
    "a range": (lambda g, d: g.ranges("layers", 2), PlanError, "sizes are how many layers each range takes, not 2"),
    "an empty range": (lambda g, d: g.ranges("layers", [2, 0]), PlanError, "the number of layers is a positive whole numb"),
    "a grid that has its devices": (split_again, PlanError, "is assigned to devices as Grid(…); split it before that"),
    "one op on devices": (lambda g, d: g.on_devices("loss/dot", [0, 1]), PlanError, "on_devices takes several ops, or the"),
    "an unknown op on devices": (lambda g, d: g.on_devices(["loss/dt"], [0]), UnknownNameError, "did you mean 'loss/dot'?"),
    "on no devices": (lambda g, d: g.on_devices(["loss/dot"], []), PlanError, "ops are to run on devices []…there are 8:"),
    "of half a stage": (lambda g, d: g.on_devices(["loss/dot"], [0], stage=0.5), PlanError, "a stage is a number, 0 or"),
    "on half a device": (lambda g, d: g.on_devices(["loss/dot"], [0.5]), PlanError, "takes the numbers of devices, 0 and"),
    "a misspelt op of a stage": (
        lambda g, d: g.on_stages(plans.single(), {"loss/dt": 0}, d.reshape(2, 4)),
        UnknownNameError,
        "no op or input named 'loss/dt' (on_stages); did you mean 'loss/dot'? known: loss/dot",
    ),
    "a misspelt input of a stage": (
        lambda g, d: g.on_stages(plans.single(), {"params/aa": 0}, d.reshape(2, 4)),
        UnknownNameError,
        "no op or input named 'params/aa' (on_stages); did you mean 'params/a'?",
    ),
    "a third stage of two": (
        lambda g, d: g.on_stages(plans.single(), {"loss/dot": 2}, d.reshape(2, 4)),
        PlanError,
        "on_stages: 'loss/dot' is of stage 2; devices have a row for each of 2 stages, 0 to 1",
    ),
    "ops without stages": (lambda g, d: g.on_stages(plans.single(), ["loss/dot"], d.reshape(2, 4)), PlanError, "not ['los"),
    "stages in one row": (
        lambda g, d: g.on_stages(plans.single(), {"loss/dot": 0}, d),
        PlanError,
        "on_stages takes an array of devices with a row for each stage, not one of shape (8,)",
    ),
    "fusing in a list": (lambda g, d: g.fuse(["loss/dot", "loss/dot.1"]), PlanError, "fuse takes an op or the path of one"),
    "fusing updates": (lambda g, d: g.fuse(*g.update()), PlanError, "fuse takes forward ops, and their backwards follow"),
    "a name of a number": (lambda g, d: g.fuse("loss/dot", name=5), PlanError, "fuse: name is the path of the new op, not"),
    "a number returned": (lambda g, d: 5, PlanError, "'policy' has decided nothing and returned 5: a policy calls graph.o"),
    "a plan returned": (lambda g, d: Plan("p", 8), PlanError, "'policy' has decided nothing and returned Plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str) -> None:
    decide, kind, sentence = POLICIES[name]

    def policy(graph: Any, devices: np.ndarray) -> Any:
        return decide(graph, devices)

    with pytest.raises(kind, match=pattern(sentence)):
        lowered(policy)


def test_what_a_policy_raises_is_its_own() -> None:
    class Mine(Exception):
        pass

    def policy(graph: Any, devices: np.ndarray) -> None:
        raise Mine("no")

    with pytest.raises(Mine, match=r"^no$"):
        lowered(policy)


def test_a_graph_after_its_policy() -> None:
    kept: list[Any] = []
    lowered(lambda graph, devices: kept.append(graph))
    with pytest.raises(PlanError, match=pattern("'op_trans  loss/dot -> [a:2]' is decided when the policy has returned")):
        kept[0].op_trans("loss/dot", Split("a", 2))
