"""What blocks of a pipeline run, keep and send, and the instructions of each group, to be read."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler import Lowered, plans

ROWS, WIDTH, MICROBATCHES = 8, 6, 4


def train_step(params: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        h = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    plan = plans.pipeline(2, MICROBATCHES, plan=plans.data_parallel("x"), at=["layer_2"], batch="x")
    return jscaler.parallelize(plan, devices=4)(train_step).lower([jnp.ones((WIDTH, WIDTH))] * 4, jnp.ones((ROWS, WIDTH)))


def test_blocks_by_name_with_what_they_keep_and_send(lowered: Lowered):
    rows = {row.name: row for row in lowered.plan.report.blocks}
    assert {"0F", "0B", "1F 1B"} <= rows.keys()
    assert [rows[name].times for name in ("0F", "0B", "1F 1B")] == [MICROBATCHES] * 3
    assert (rows["0F"].devices, rows["1F 1B"].devices) == ([0, 1], [2, 3])
    assert (rows["0F"].first, rows["0F"].last, rows["0F"].num_ops) == ("layer_0/dot", "layer_1/tanh", 4)
    rows_of_a_device = ROWS // MICROBATCHES // 2
    assert rows["0F"].kept == 2 * rows_of_a_device * WIDTH * 4  # what both layers leave; the batch lies there anyway
    assert rows["0B"].kept == rows["1F 1B"].kept == 0
    assert [len(rows[name].sends) for name in ("0F", "0B", "1F 1B")] == [1, 0, 1]
    assert all(row.times == 1 for name, row in rows.items() if name.startswith("block"))


def test_explain_has_a_line_for_each_block(lowered: Lowered):
    text = lowered.plan.explain(["ops"])
    (line,) = [line for line in text.splitlines() if line.startswith("0F ")]
    assert line.split()[:7] == ["0F", "4", "[0", "1]", "4", "layer_0/dot", "layer_1/tanh"]
    assert "48 B" in line
    alone = jscaler.parallelize("single", devices=1)(train_step).lower([jnp.ones((WIDTH, WIDTH))], jnp.ones((ROWS, WIDTH)))
    assert alone.plan.report.blocks == ()


def test_a_pipeline_prints_as_instructions_of_each_group(lowered: Lowered):
    head, first, second = str(lowered).split("\n\n")
    assert "as 7 blocks" in head
    assert first.startswith("devices [0 1]\n")
    assert second.startswith("devices [2 3]\n")
    for one, other in ((first, second), (second, first)):
        sent = [
            line.split("  ")[1] + line.partition("micro-batch")[2][:2] for line in one.splitlines() if line[:4] == "send"
        ]
        taken = [
            line.split("  ")[1] + line.partition("micro-batch")[2][:2] for line in other.splitlines() if line[:4] == "take"
        ]
        assert sent == taken
        assert len(sent) == MICROBATCHES
    runs = [line.split()[1] + line.split()[3] for line in first.splitlines() if line.startswith("run   0")]
    assert " ".join(runs) == str(lowered.plan.instructions.table).splitlines()[0]
    assert len(repr(lowered)) < 80


def test_text_says_which_block_it_is_of(lowered: Lowered):
    text = lowered.as_text()
    assert "// 2: the forward block of stage 0 (devices 0 1)\n" in text
    assert lowered.as_text(block=2) in text
    assert lowered.as_text(block=2).count("module @") == 1
