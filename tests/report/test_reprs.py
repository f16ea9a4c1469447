"""What a user holds (a step, its graph, its plan, lowered and compiled) in a few lines, and as HTML that folds."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report.stand_in import on_cpu

import jscaler
from bench.reprs import built_in, held, vit
from jscaler import Split
from jscaler.ir.overview import MOST_BYTES, MOST_LINES
from jscaler.ir.passes import Passes, run_passes
from jscaler.report.target_report import heading, verdict
from tests.ir.test_overview import Page


@pytest.mark.parametrize("model", ["ViT", "gpt-1.3b", "llama-8b"])
def test_of_large_models_it_is_short(model: str) -> None:
    objects = held(*(vit(layers=2) if model == "ViT" else built_in(model, stacked=True)), "megatron(dp=2, tp=4)")
    for name, one in objects.items():
        lines = repr(one).splitlines()
        assert len(lines) <= MOST_LINES, name
        assert any(call in lines[-1] for call in (".lower(", ".plan", "explain()", "print(")), f"{name} says where more is"
        page = one._repr_html_()
        assert len(page.encode()) <= MOST_BYTES, name
        assert len(Page(page).found["summary"]) > 20, name


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        with jax.named_scope("up"):
            h = batch @ p["up"]
        with jax.named_scope("down"):
            return jnp.mean((jnp.tanh(h) @ p["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jscaler.grad(loss)(params))


@pytest.fixture(scope="module")
def decorated() -> Any:
    return jscaler.parallelize("data_parallel", devices=4)(step)


@pytest.fixture(scope="module")
def arguments() -> Any:
    shape = jax.ShapeDtypeStruct
    return {"up": shape((8, 16), "float32"), "down": shape((16, 8), "float32")}, shape((32, 8), "float32")


def test_it_says_what_a_thing_is_with_the_numbers(decorated: Any, arguments: Any) -> None:
    assert repr(decorated).splitlines()[0] == "step under plan data_parallel, on 4 devices"
    lowered = decorated.lower(*arguments)
    assert "lowered for 1 form of its arguments, compiled for 0" in repr(decorated)
    assert repr(lowered) == "Lowered(data_parallel, 1 block on 4 devices); see .plan"
    graph = lowered.captured.graph
    kinds = ", ".join(f"{len(graph.of_kind(kind))} {kind}" for kind in ("forward", "backward", "update"))
    assert repr(graph).splitlines()[:3] == [
        f"Graph of {len(graph.ops)} ops: {kinds}",
        "inputs: 3 tensors, 512 numbers, 2.0 KiB",
        "gradients of 2 tensors, 256 numbers, 1.0 KiB",
    ]
    first, second, memory, sent, _ = repr(lowered.plan).splitlines()
    decisions = len(lowered.plan.plan.decisions)
    assert first == f"plan data_parallel on 4 devices, mesh x0=4, {decisions} decisions"
    assert second == f"{len(lowered.graph.ops)} ops in 1 block, 3 leaves of arguments"
    assert "parameter 1.0 KiB of 1.0 KiB" in memory
    assert "input 256 B of 1.0 KiB" in memory
    assert f"{2 * 3 / 4 * 256 * 4 / 1024:.1f} KiB" in sent, "the gradients' all-reduces"
    assert repr(lowered.plan.plan).startswith(f"Plan data_parallel on 4 devices: {decisions} decisions\n")
    compiled = lowered.compile()
    assert repr(compiled).splitlines()[1:] == repr(lowered.plan).splitlines()


def test_passes_are_few_lines(decorated: Any, arguments: Any) -> None:
    lines = repr(decorated.lower(*arguments).passes).splitlines()
    assert re.match(r"\d+ passes in .* s; \d+ change the count of ops", lines[0])
    assert "print(lowered.passes) has a line for every pass" in lines[-1]
    _, runs = run_passes(0, [lambda number: number + 1] * 30, lambda number: number)
    many = repr(Passes(runs)).splitlines()
    assert len(many) <= MOST_LINES
    assert many[1] == "<lambda>: 0 ops to 1"
    assert many[-2] == "and 14 more of these"
    assert "passes: 30" in Page(Passes(runs)._repr_html_()).found["summary"]


def test_an_executable_is_few_lines(decorated: Any, arguments: Any) -> None:
    executable = decorated.lower(*arguments).executable
    head, block, more = repr(executable).splitlines()
    assert head == "Executable of 1 block: 3 leaves in, 0 donated; 2 leaves out, 0 as they came"
    assert block == "block 0: takes 3 leaves and 0 values of other blocks, computes 2 values"
    assert "print(lowered)" in more
    many = repr(dataclasses.replace(executable, blocks=executable.blocks * 30)).splitlines()
    assert len(many) <= MOST_LINES
    assert many[-2] == "and 14 more"


def test_a_target_s_report_is_few_lines(decorated: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    report = decorated.lower(*arguments).compile(target="4xH100-80GB")
    lines = repr(report).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[:2] == [heading(report), verdict(report.memory)]
    assert any(line.startswith("the fullest device: parameters 1.0 KiB") for line in lines)
    assert "1 block compiled in" in lines[-2]
    assert "print(report) has the tables" in lines[-1]
    assert f"held at the peak: {len(report.contributors)}" in Page(report._repr_html_()).found["summary"]


def test_a_notebook_folds_by_module(decorated: Any, arguments: Any) -> None:
    lowered = decorated.lower(*arguments)
    page = Page(lowered._repr_html_())
    in_up = sum(op.path.startswith("up/") for op in lowered.graph.ops)
    assert {f"ops: {len(lowered.graph.ops)}", f"up: {in_up}", "leaves of arguments: 3"} <= {*page.found["summary"]}
    cells = page.found["td"]
    first = cells.index("dot")
    assert cells[first : first + 4] == ["dot", "forward", "a:4", "R1 V1 D(4,1)"]


def test_handles_are_one_line(decorated: Any, arguments: Any) -> None:
    seen: dict[str, str] = {}

    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph["up/dot"]
        grid = graph.op_trans(op, Split("a", 4))
        graph.op_assign(grid, devices)
        seen.update(op=repr(op), grid=repr(grid), graph=repr(graph))

    jscaler.parallelize(policy, devices=4)(step).lower(*arguments)
    assert seen["op"] == "Op(up/dot, forward, f32[32,8], f32[8,16] -> f32[32,16])"
    assert seen["grid"] == "Grid(up/dot [a:4]) a=batch[0]"
    assert seen["graph"] == repr(decorated.graph(*arguments))
