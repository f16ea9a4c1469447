"""Collectives in loops run once per iteration: of texts, and of stacked models, whose HLO agrees with ``explain``."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from lower.layers import batch, columns_then_rows, loops_in_loops, net_batch, net_state, net_step, params, step_of

import jscaler
from jscaler import Split
from jscaler.report.hlo import AS_WRITTEN, Totals, collectives, totals
from jscaler.text.units import readable_bytes

REDUCE = "%{name} = f32[4]{{0}} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%add"


def loop(name: str, trips: int | None) -> str:
    known = (
        f', backend_config={{"x":"y","known_trip_count":{{"n":"{trips}"}},"z":{{"n":"9"}}}}' if trips is not None else ""
    )
    return f"  %w.{name} = (s32[], f32[4]{{0}}) while(%t), condition=%{name}_cond, body=%{name}_body{known}"


def block(header: str, *lines: str) -> list[str]:
    return [f"{header} (p: (s32[], /*index=1*/f32[4])) -> (s32[], f32[4]) {{", *(f"  {line}" for line in lines), "}", ""]


def condition(name: str, *lines: str) -> list[str]:
    return block(f"%{name}_cond", *lines, "ROOT %c = pred[] compare(%i, %n), direction=LT")


def module(outer: int | None, inner: int | None, *conditions: str) -> str:
    """A loop in a loop, the inner one in a computation that is called; a branch; and a collective outside."""
    return "\n".join([
        "HloModule jit_run, num_partitions=2",
        *block("%add", "ROOT %s = f32[] add(%a, %b)"),
        *block("%inner_body.2", REDUCE.format(name="i")),
        *condition("inner", *conditions),
        *block("%called", loop("inner", inner).replace("inner_body", "inner_body.2")),
        *block("%outer_body", REDUCE.format(name="o"), "%k = f32[4] call(%p), to_apply=%called"),
        *condition("outer"),
        *block("%yes", REDUCE.format(name="y")),
        *block("%no", "ROOT %n = f32[4] negate(%p)"),
        *block(
            "ENTRY %main",
            loop("outer", outer),
            "%b = f32[4] conditional(%i, %p, %p), branch_computations={%no, %yes}",
            REDUCE.format(name="m"),
        ),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (module(3, 5), [15, 3, 1, 1]),
        (module(3, None, "%n = s32[] constant(7)"), [21, 3, 1, 1]),
        (module(3, None, "%f = s32[] fusion(%p), kind=kLoop, calls=%number"), [3, 3, 1, 1]),
        (module(3, None, "%n = s32[] constant(7)", "%m = s32[] constant(8)"), [3, 3, 1, 1]),
        (module(None, 5), [5, 1, 1, 1]),
        (module(0, 5), [0, 0, 1, 1]),
    ],
    ids=["known", "compared", "not in the text", "two numbers", "unknown", "never"],
)
def test_a_body_runs_as_often_as_the_loops_around_it(text: str, times: list[int]) -> None:
    found = collectives(text)
    assert [c.times for c in found] == times
    assert {c.sent for c in found} == {16.0}
    assert totals(text) == {"all-reduce": Totals(sum(times), sum(times), 16 * sum(times))}


def test_a_computation_that_is_called_twice_runs_twice() -> None:
    calls = ["%a = f32[4] call(%p), to_apply=%called", "%b = f32[4] call(%a), to_apply=%called"]
    blocks = [*block("%called", REDUCE.format(name="c")), *block("%body", *calls), *block("ENTRY %main", calls[0])]
    assert [c.times for c in collectives("\n".join(blocks))] == [1 + 2]


def rows(graph: Any, devices: np.ndarray) -> None:
    for op in graph.forward():
        if op.name == "dot.1":
            graph.op_assign(graph.op_trans(op, Split("b", devices.size)), devices)


@pytest.mark.parametrize(
    ("policy", "step", "arguments"),
    [
        (columns_then_rows, net_step(True), lambda: (net_state(), net_batch())),
        (rows, step_of(loops_in_loops), lambda: (params(), batch())),
    ],
    ids=["stacked layers", "loops in loops"],
)
def test_what_explain_counts_is_what_the_program_sends(
    policy: Callable[..., None], step: Callable[..., Any], arguments: Callable[[], Any]
) -> None:
    args = arguments()
    lowered = jscaler.parallelize(policy, devices=2)(step).lower(*args)
    jitted = lowered.executable.blocks[0].jitted.lower(*jax.tree.leaves(args))
    found = collectives(jitted.compile(compiler_options=AS_WRITTEN).as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    assert max(c.times for c in found) > 2
    count, sent = sum(c.times * c.arrays for c in found), sum(c.times * c.sent for c in found)
    assert lowered.plan.explain().splitlines()[-1] == f"total: {count}× all_reduce {readable_bytes(sent)}"
