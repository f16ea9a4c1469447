"""The bench of longest sequences on a tiny GPT and a CPU, which accounts for memory in the same way."""

import jax
import pytest

from bench import coshard
from bench.coshard import NONE, RECOMPUTE, Bench, Case
from models.gpt import GPTConfig

TINY = GPTConfig(hidden=16, layers=2, heads=2, sequence=8, vocabulary=32, stacked=True, dropout=0.0)
OPTIONS = {"xla_backend_optimization_level": 0}  # nothing runs


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cpu", jax.devices()[0], 250_000, TINY, unit=16, equal=32, options=OPTIONS)


@pytest.mark.one_day_in(2)
def test_a_row_has_the_longest_that_fits(bench: Bench) -> None:
    row = bench.row(NONE, 16, plain=False)
    found = bench.longest(NONE, coshard.planned)  # known by now
    assert found.seen[found.steps] <= bench.capacity < found.seen[found.steps + 1]
    expected = {"max_seq": 16 * found.steps, "peak_bytes": found.peak, "flops_ratio": 1, "to_recompute": found.steps}
    assert {key: row[key] for key in expected} == expected


@pytest.mark.one_day_in(2)
def test_flops_of_a_step_are_those_on_paper(bench: Bench) -> None:
    s, d, layers, vocabulary = bench.equal, TINY.hidden, TINY.layers, TINY.vocabulary
    forward = layers * (2 * s * 12 * d * d + 2 * 2 * s * s * d) + 2 * s * d * vocabulary
    assert bench.flops(NONE) == 3 * forward
    again = layers * (2 * s * 8 * d * d + 2 * 2 * s * s * d)  # the last product of a layer is not computed again
    assert bench.flops(RECOMPUTE) == 3 * forward + again
    assert bench.flops(Case("recompute", "recompute_layers")) == 3 * forward + again


def test_plain_jit_has_the_same_products(bench: Bench) -> None:
    assert coshard.dot_flops(bench.compiled(NONE, coshard.plainly, 32).as_text()) == bench.flops(NONE)


def test_a_text_chooses_rows_or_is_a_plan() -> None:
    assert coshard.chosen(None) == coshard.CASES
    assert RECOMPUTE in coshard.chosen("recompute")
    assert coshard.chosen("data_parallel") == [Case("data_parallel", "data_parallel")]
