"""Bad input gets an error of our own, early, that says what, where, the numbers, and the remedy."""

import inspect
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jscaler
from jscaler import Plan, Replicate, Split, plans
from jscaler.cli import app
from jscaler.errors import (
    CaptureError,
    CaptureWarning,
    DeletedArgumentError,
    DeviceError,
    PlanError,
    PlanFileError,
    PlanWarning,
    SplitError,
    UnknownNameError,
)
from jscaler.primitives import Chunk, Prefix, TimeSplit

PARAMS = {"a": jnp.linspace(-1, 1, 8 * 16).reshape(8, 16), "b": jnp.linspace(1, -1, 16 * 8).reshape(16, 8)}
BATCH = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


def step(params: Any, batch: jax.Array) -> Any:
    """Ops loss/dot, loss/dot.1, loss/reduce_sum, loss/div."""

    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)

    value, grads = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def lowered(plan: Any, **options: Any) -> Any:
    return jscaler.parallelize(plan, **{"devices": 8, **options})(step).lower(PARAMS, BATCH)


# -- plans and their arguments

PLANS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, PlanError, "a plan is a policy, a plan's name or a Plan, not None"),
    "number": (5, PlanError, "a plan is a policy, a plan's name or a Plan, not 5"),
    "name": ("data_paralel", UnknownNameError, "did you mean 'data_parallel'"),
    "half a call": ("data_parallel(", PlanError, "cannot read the plan 'data_parallel('"),
    "code": ("__import__('os').getcwd()", PlanError, "write its arguments as literals"),
    "an argument too many": ("single(3)", PlanError, "single"),
    "an unknown argument": ("data_parallel(bacth='x')", UnknownNameError, "did you mean 'batch'"),
    "no policy": (lambda: None, PlanError, "a policy is a function of (graph, devices), and '<lambda>' takes ()"),
    "plan that was not called": (plans.accumulate, PlanError, "plans.accumulate makes a policy of its arguments: call it"),
    "maker of policies": (lambda g, d: lambda g, d: None, PlanError, "decided nothing and returned a policy"),
    "batch is a number": ("data_parallel(3)", PlanError, "batch is the path or a pattern of inputs, … not 3"),
    "batch is nothing": ("data_parallel(batch='')", UnknownNameError, "no input named ''"),
    "batch is another": ("data_parallel(batch='bath')", UnknownNameError, "may be data; known: batch: f32[16,8]"),
    "no micro-batches": ("accumulate(0)", PlanError, "accumulate: microbatches is a positive whole number, not 0"),
    "micro-batches as text": ("accumulate('4')", PlanError, "microbatches is a positive whole number, not '4'"),
    "half a micro-batch": ("accumulate(2.5)", PlanError, "microbatches is a positive whole number, not 2.5"),
    "minus one micro-batch": ("accumulate(-1)", PlanError, "microbatches is a positive whole number, not -1"),
    "true micro-batches": ("accumulate(True)", PlanError, "microbatches is a positive whole number, not True"),
    "three micro-batches": ("accumulate(3)", SplitError, "cannot split … of size 16 into 3 parts; legal: 1, 2, 4, 8, 16"),
    "no data": ("megatron(0, 8)", PlanError, "megatron: dp is a positive whole number, not 0"),
    "too few": ("megatron(3, 2)", PlanError, "megatron: dp=3 × tp=2 is a grid of 6 devices, and 8 are given"),
    "text": ("megatron('a')", PlanError, "megatron: dp is a positive whole number, not 'a'"),
    "no stages": ("pipeline(0, 4)", PlanError, "pipeline: stages is a positive whole number, not 0"),
    "three stages": ("pipeline(3, 4)", PlanError, "8 devices do not divide into 3 stages; legal: [1, 2, 4, 8]"),
    "no schedule": ("pipeline(2, 4, 'zb_h9')", UnknownNameError, "zb_h9"),
    "no parts": ("co_shard(0)", PlanError, "co_shard: parts is a positive whole number, not 0"),
    "half parts": ("co_shard(1.5)", PlanError, "co_shard: parts is a positive whole number, not 1.5"),
    "no such layers": ("recompute_layers(on='blok')", UnknownNameError, "no module named 'blok'"),
    "every zeroth": ("recompute_layers(every=0)", PlanError, "every is 0"),
    "a file that is not there": ("nowhere.json", PlanFileError, "'nowhere.json' cannot be read: No such file"),
    "a policy's file that is not there": ("nowhere.py:policy", PlanError, "nowhere.py"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    plan, kind, sentence = PLANS[name]
    with pytest.raises(kind, match=pattern(sentence)):
        lowered(plan)


def pattern(sentence: str) -> str:
    """A fragment of a sentence as a regular expression: ``…`` stands for anything."""
    return re.escape(sentence).replace("…", ".*")


# -- devices and options of the decorator

OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "half a device": ({"devices": 2.5}, DeviceError, "devices are a number or a list of jax.Device, not 2.5"),
    "no device": ({"devices": 0}, DeviceError, "0 devices are asked for; ask for 1 to 8"),
    "minus two": ({"devices": -2}, DeviceError, "-2 devices are asked for; ask for 1 to 8"),
    "text": ({"devices": "2"}, DeviceError, "devices are a number or a list of jax.Device, not '2'"),
    "none of them": ({"devices": []}, DeviceError, "devices are one or more, each once, not []"),
    "a truth": ({"devices": True}, DeviceError, "devices are a number or a list of jax.Device, not True"),
    "numbers": ({"devices": [0, 1]}, DeviceError, "devices are a number or a list of jax.Device, not [0, 1]"),
    "no cluster": ({"cluster": "v101"}, UnknownNameError, "no cluster named 'v101'"),
    "a number": ({"cluster": 5}, PlanError, "cluster is a Cluster, a built-in one's name or a .toml file, not 5"),
    "no file": ({"cluster": "nowhere.toml"}, jscaler.errors.JscalerError, "nowhere.toml"),
    "no argument": ({"donate_argnames": "stat"}, UnknownNameError, "no argument named 'stat' (donate_argnames)"),
    "no ninth argument": ({"donate_argnums": 9}, CaptureError, "donate_argnums=9, but the step has 2 arguments"),
    "static and donated": (
        {"donate_argnames": "params", "static_argnames": "params"},
        CaptureError,
        "argument 'params' cannot be both static and donated",
    ),
    "no pass": ({"without_passes": "nope"}, PlanError, "no pass 'nope' can be left out; those that can"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, kind, sentence = OPTIONS[name]
    with pytest.raises(kind, match=pattern(sentence)):
        lowered("data_parallel", **options)


def test_a_device_twice() -> None:
    with pytest.raises(DeviceError, match="devices are one or more, each once, not"):
        lowered("data_parallel", devices=[jax.devices()[0]] * 2)


# -- what a policy may get wrong

Policy = Callable[[Any, np.ndarray], Any]
DECISIONS: dict[str, tuple[Policy, type[Exception], str]] = {
    "no op": (lambda g, d: g.op_trans(None, Split("a", 4)), PlanError, "op_trans takes an op or the path of one, such as"),
    "a number": (lambda g, d: g.op_trans(5, Split("a", 4)), PlanError, "such as 'loss/dot', not 5"),
    "another op": (lambda g, d: g.op_trans("loss/dt", Split("a", 4)), UnknownNameError, "did you mean 'loss/dot'"),
    "no algorithm": (lambda g, d: g.op_trans("loss/dot", None), PlanError, "None is no algorithm; give Split('a', 2)"),
    "text for an algorithm": (lambda g, d: g.op_trans("loss/dot", "a"), PlanError, "'a' is no algorithm"),
    "no factor": (lambda g, d: g.op_trans("loss/dot", Split(None, 4)), PlanError, "a factor is a name (a, b, c), or a"),
    "a number for a factor": (lambda g, d: g.op_trans("loss/dot", Split(1, 4)), PlanError, "not 1"),
    "a dim as text": (lambda g, d: g.op_trans("loss/dot", Split(("params/a", "0"), 4)), PlanError, "('params/a', '0')"),
    "another dim": (lambda g, d: g.op_trans("loss/dot", Split(("params/a", 7), 4)), PlanError, "has no splittable dim 7"),
    "another tensor": (lambda g, d: g.op_trans("loss/dot", Split(("kernel", 0), 4)), UnknownNameError, "'kernel'"),
    "another factor": (lambda g, d: g.op_trans("loss/dot", Split("z", 4)), UnknownNameError, "no factor named 'z'"),
    "no parts": (lambda g, d: g.op_trans("loss/dot", Split("a", 0)), PlanError, "the number of parts is a positive whole"),
    "parts as text": (lambda g, d: g.op_trans("loss/dot", Split("a", "4")), PlanError, "number, not '4'"),
    "half parts": (lambda g, d: g.op_trans("loss/dot", Split("a", 2.5)), PlanError, "number, not 2.5"),
    "neither parts nor sizes": (lambda g, d: g.op_trans("loss/dot", Split("a")), PlanError, "a Split has parts or sizes"),
    "both": (lambda g, d: g.op_trans("loss/dot", Split("a", 2, (8, 8))), PlanError, "a Split has parts or sizes"),
    "sizes that do not add up": (lambda g, d: g.op_trans("loss/dot", Split("a", sizes=(8, 7))), SplitError, "up to 15"),
    "sizes of nothing": (lambda g, d: g.op_trans("loss/dot", Split("a", sizes=(16, 0))), PlanError, "whole numbers"),
    "parts that do not divide": (lambda g, d: g.op_trans("loss/dot", Split("a", 5)), SplitError, "legal: 1, 2, 4, 8, 16"),
    "no copies": (lambda g, d: g.op_trans("loss/dot", Replicate(0)), PlanError, "positive whole number, not 0"),
    "copies as text": (lambda g, d: g.op_trans("loss/dot", Replicate("4")), PlanError, "positive whole number, not '4'"),
    "no chunks": (lambda g, d: g.op_trans("loss/dot", Chunk("a", 0)), PlanError, "positive whole number, not 0"),
    "a nameless axis": (lambda g, d: g.op_trans("loss/dot", TimeSplit("a", 2, "")), PlanError, "a time axis has a name"),
    "a prefix of a product": (lambda g, d: g.op_trans("loss/dot", Prefix("a", 2)), SplitError, "finds nothing in it"),
    "twice": (
        lambda g, d: (g.op_trans("loss/dot", Split("a", 2)), g.op_trans("loss/dot", Split("b", 2))),
        PlanError,
        "'loss/dot' was split before",
    ),
    "no cells": (lambda g, d: g.op_assign(None, d), PlanError, "op_assign takes an op or the path of one"),
    "no devices": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 8)), None),
        PlanError,
        "has 8 cells and is assigned to 1 devices",
    ),
    "too few devices": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 8)), d[:3]),
        PlanError,
        "has 8 cells and is assigned to 3 devices",
    ),
    "a ninth device": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 2)), [7, 8]),
        PlanError,
        "is assigned to devices [8]; there are 8: 0 to 7",
    ),
    "device minus one": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 2)), [0, -1]),
        PlanError,
        "is assigned to devices [-1]; there are 8: 0 to 7",
    ),
    "cells that nobody assigned": (
        lambda g, d: g.op_assign(g.op_trans("loss/dot", Split("a", 2))[0], 0),
        PlanError,
        "was split into 2 cells and 1 of them have no device",
    ),
    "order of nothing": (lambda g, d: g.op_order(None, "loss/dot"), PlanError, "op_order takes an op or the path of one"),
    "order of a part": (lambda g, d: g.op_order(("loss/dot", "0"), "loss/dot.1"), PlanError, "the number of a part"),
    "order of an unsplit op's part": (
        lambda g, d: g.op_order(("loss/dot", 0), "loss/dot.1"),
        PlanError,
        "give it one time axis with that part",
    ),
    "a circle": (
        lambda g, d: (g.op_order("loss/dot.1", "loss/dot"),),
        jscaler.errors.OrderError,
        "loss/dot",
    ),
    "fusing nothing": (lambda g, d: g.fuse(None, "loss/dot"), PlanError, "fuse takes an op or the path of one"),
    "fusing one": (lambda g, d: g.fuse("loss/dot"), PlanError, "fuse"),
    "another input": (lambda g, d: g.factor_of("params/c", 0), UnknownNameError, "no input named 'params/c'"),
    "another dim of an input": (lambda g, d: g.factor_of("params/a", 2), PlanError, "has no dim 2"),
    "another mode": (lambda g, d: g.residuals("loss/dot", "kept"), PlanError, "residuals are 'inputs' or 'saved'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    decide, kind, sentence = DECISIONS[name]

    def policy(graph: Any, devices: np.ndarray) -> None:
        decide(graph, devices)

    with pytest.raises(kind, match=pattern(sentence)):
        lowered(policy)


# -- calls

CALLS: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "nothing": ((), CaptureError, "the step takes (params, batch), and was called otherwise: missing"),
    "too much": ((PARAMS, BATCH, 3), CaptureError, "the step takes (params, batch), and was called otherwise: too many"),
    "text": ((PARAMS, "hello"), CaptureError, "argument 'batch' is a str, not an array"),
    "13 rows": ((PARAMS, jnp.ones((13, 8))), SplitError, "of size 13 into 8 parts; legal: 1, 13"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    args, kind, sentence = CALLS[name]
    with pytest.raises(kind, match=pattern(sentence)):
        jscaler.parallelize("data_parallel", devices=8)(step)(*args)


def test_a_deleted_array() -> None:
    gone = jnp.ones((16, 8))
    gone.delete()
    with pytest.raises(DeletedArgumentError, match="1 argument has been deleted: 'batch'"):
        jscaler.parallelize("data_parallel", devices=8)(step)(PARAMS, gone)


def test_a_decorator_without_a_plan() -> None:
    decorated = jscaler.parallelize(step)
    with pytest.raises(CaptureError, match=r"@jscaler.parallelize\('data_parallel'\) above 'def step'"):
        decorated(PARAMS, BATCH)


# -- what works as it does under jax.jit

WANTED = jax.jit(lambda p, x: step(p, x))


def assert_right(found: Any) -> None:
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(WANTED(PARAMS, BATCH)), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5)


class Trainer:
    """Its method is a step; each object has its own."""

    def __init__(self, scale: float):
        self.scale = scale

    @jscaler.parallelize("data_parallel", devices=4, static_argnames="times", donate_argnames="scratch")
    def step(self, params: Any, batch: jax.Array, scratch: jax.Array, times: int = 1) -> Any:
        """A step."""
        found, value = step(params, batch)
        return jax.tree.map(lambda x: x * self.scale * times, found), value


def test_methods() -> None:
    for scale, times in ((1.0, 1), (2.0, 1), (1.0, 3)):
        trainer = Trainer(scale)
        for _ in range(2):
            found, _ = trainer.step(PARAMS, BATCH, jnp.zeros(4), times=times)
        right, _ = WANTED(PARAMS, BATCH)
        np.testing.assert_allclose(found["a"], right["a"] * scale * times, rtol=1e-5)
        assert trainer.step is trainer.step
    assert isinstance(Trainer.step, jscaler.api.Parallelized)
    assert inspect.getdoc(Trainer.step) == "A step."


def test_methods_of_what_changes_are_refused() -> None:
    from flax import nnx

    class Model(nnx.Module):
        @jscaler.parallelize("data_parallel", devices=4)
        def step(self, batch: jax.Array) -> jax.Array:
            return batch

    with pytest.raises(CaptureError, match="'step' is a method of an nnx object, whose arrays would be constants"):
        Model().step(BATCH)

    class Slotted:
        __slots__ = ()
        step = jscaler.parallelize("data_parallel", devices=4)(lambda self, batch: batch)

    with pytest.raises(CaptureError, match="a Slotted, which has __slots__"):
        Slotted().step(BATCH)


def test_without_jit_the_step_is_undecorated() -> None:
    decorated = jscaler.parallelize("data_parallel", devices=4)(step)
    with jax.disable_jit(), pytest.warns(CaptureWarning, match="'step' runs undecorated, on one device"):
        found = decorated(PARAMS, BATCH)
    assert_right(found)


def test_no_tracer_leaks() -> None:
    with jax.checking_leaks():
        assert_right(jscaler.parallelize("megatron(2, 2)", devices=4)(step)(PARAMS, BATCH))


def test_plans_are_pickled() -> None:
    plan = lowered("data_parallel").plan.plan
    assert pickle.loads(pickle.dumps(plan)).digest == plan.digest


def test_numbers_of_four_bits() -> None:
    weights = jnp.arange(-8, 8).reshape(4, 4).astype(jnp.int4)

    def forward(weights: jax.Array, batch: jax.Array) -> jax.Array:
        return batch @ weights.astype(jnp.float32)

    found = jscaler.parallelize("data_parallel", devices=4)(forward)(weights, BATCH[:, :4])
    np.testing.assert_allclose(found, jax.jit(forward)(weights, BATCH[:, :4]), rtol=1e-6)


def test_effects_of_what_is_copied() -> None:
    def printing(params: Any, batch: jax.Array) -> jax.Array:
        jax.debug.print("{}", params["a"].sum())
        return batch @ params["a"]

    with pytest.warns(PlanWarning, match=r"happen on every device: 'loss/debug_print' .* 4 times"):
        jscaler.parallelize("data_parallel", devices=4)(printing).lower(PARAMS, BATCH)


# -- files of plans


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "plan.json"
    lowered("data_parallel").plan.save(path)
    return path, json.loads(path.read_text())


def edited(**change: Any) -> Callable[[dict[str, Any]], str]:
    return lambda data: json.dumps({**data, **change})


FILES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "nothing": (lambda data: "", "it is no JSON"),
    "half": (lambda data: json.dumps(data)[:200], "it is no JSON"),
    "nested": (lambda data: "[" * 100_000 + "]" * 100_000, "it is no JSON"),
    "nested within": (
        lambda data: json.dumps(data)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "it is no JSON",
    ),
    "a list": (lambda data: "[]", "it is no plan file: its 'format' is not"),
    "another format": (edited(format="other"), "its 'format' is not 'jscaler plan'"),
    "no version": (edited(version=None), "its version is None"),
    "a later version": (edited(version=99), "it is of version 99, and this jscaler reads up to version"),
    "version zero": (edited(version=0), "its version is 0, not a whole number from 1"),
    "an unknown key": (edited(devcies=3), "'devcies' is nothing a plan file has; did you mean 'devices'"),
    "no devices": (edited(devices=0), "'devices' is 0; a plan is for one device or more"),
    "devices as text": (edited(devices="8"), "devices"),
    "a name that is none": (edited(name=3), "name"),
    "places that are none": (edited(places=[["x"]]), "places[0][0]"),
    "decisions that are none": (edited(decisions=[3]), "decisions[0]"),
    "an unknown decision": (edited(decisions=[{"kind": "Transs"}]), "decisions[0]"),
    "decisions as text": (edited(decisions="x"), "decisions"),
    "changed decisions": (lambda data: json.dumps({**data, "decisions": data["decisions"][:-1]}), "were changed after"),
    "ops that are none": (edited(ops=[3]), "ops"),
    "rules that are none": (edited(rules=[3]), "rules"),
    "nothing for ops": (lambda data: json.dumps({k: v for k, v in data.items() if k != "decisions"}), "decisions"),
}


@pytest.mark.parametrize("name", FILES)
def test_plan_files(name: str, tmp_path: Path) -> None:
    text, sentence = FILES[name]
    path, data = saved(tmp_path)
    path.write_text(text(data))
    with pytest.raises(PlanFileError, match=pattern(sentence)):
        Plan.load(path)


def test_plan_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(bytes(range(128, 256)))
    for path, sentence in (("none.json", "No such file"), ("", "Is a directory"), ("bytes.json", "utf-8")):
        with pytest.raises(PlanFileError, match=f"cannot be read: .*{sentence}"):
            Plan.load(tmp_path / path)
    with pytest.raises(PlanFileError, match="cannot be written: No such file"):
        lowered("data_parallel").plan.save(tmp_path / "nowhere" / "plan.json")


def test_strict_on_the_command_line(tmp_path: Path) -> None:
    policy = tmp_path / "columns.py"
    policy.write_text(
        "from jscaler import Split\n\ndef columns(graph, devices):\n"
        "    op = graph['block_0/attn/out/dot']\n"
        "    factor = graph.factor_of('state/params/block_0/attn/out/kernel', 2)[op]\n"
        "    graph.op_assign(graph.op_trans(op, Split(factor, devices.size)), devices)\n"
    )
    command = [
        "plan",
        "--size",
        "nano",
        "--batch",
        "4",
        "--no-stacked",
        "--devices",
        "4",
        "--plan",
        f"{policy}:columns",
        "--strict",
    ]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, PlanError)
    assert "is refused, since strict=True: parallelism is lost" in str(result.exception)
