"""Random regions of random programs under random plans are computed again, and the numbers stay those of ``jax.jit``."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from losing import losing

import jscaler
from jscaler.errors import PlanError
from jscaler.ir import Nest, Op
from jscaler.ir.loop import made_by, reads_of
from jscaler.ir.walk import between
from jscaler.primitives.recompute_regions import _items_in
from tests.programs import LEARNING_RATE, devices_of, draw_policy, draw_program

pytestmark = losing


def random_region(graph: Any, rng: np.random.Generator) -> list[Op]:
    """Some ops and loops of one body, and what lies between them."""
    loops = [None, *(n for n, loop in graph.loops.items() if loop.forward is None and loop.parent is None)]
    items = [
        i for i in _items_in(graph.graph, loops[rng.integers(len(loops))], graph.graph.ops) if _ops(i)[0].kind == "forward"
    ]
    share = rng.choice([0.2, 0.6, 1.0])
    own = {op.path for item in items if rng.random() < share for op in _ops(item)}
    chosen = {item for item in items if _ops(item)[0].path in own}
    own |= {op.path for item in between(items, chosen, reads_of, made_by) for op in _ops(item)}
    return [op for op in graph.forward() if op.path in own]


def _ops(item: Op | Nest) -> list[Op]:
    return [item] if isinstance(item, Op) else list(item.ops())


def policy_of(seed: int, num_devices: int, made: list[str]) -> Any:
    split = draw_policy(seed, num_devices)

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = np.random.default_rng(seed)
        split(graph, devices)
        for _ in range(3):
            region = random_region(graph, rng)
            keep = [op for op in region if rng.random() < 0.2]
            try:
                graph.recompute(region, keep)
                made.append("region")
            except PlanError as error:  # no gradient flows through it, or it meets another region half
                if not any(why in str(error) for why in ("no gradient", "none was given", "are part of region")):
                    raise

    return policy


def differences(seed: int, steps: int = 1) -> tuple[list[str], float]:
    """The regions that were made, and the largest difference to ``jax.jit`` in units of what is allowed."""
    program, devices, made = draw_program(seed), devices_of(seed), list[str]()
    step = jscaler.parallelize(policy_of(seed, devices, made), devices=devices)(program.train_step)
    lowered = step.lower(program.params, program.batch)
    jscaler.verify(lowered)
    run = lowered.compile()
    plain = jax.jit(program.train_step).lower(program.params, program.batch).compile()
    mine, true = run(program.params, program.batch), plain(program.params, program.batch)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(true), strict=True):
        worst = max(worst, _difference(np.asarray(a), np.asarray(b)))
    return made, worst


def _difference(ours: np.ndarray, true: np.ndarray) -> float:
    assert np.array_equal(np.isnan(ours), np.isnan(true))
    allowed = 1e-10 * max(float(np.nanmax(np.abs(true), initial=0.0)), LEARNING_RATE)
    return float(np.nanmax(np.abs(ours - true), initial=0.0)) / allowed


SEEDS: Sequence[int] = range(3)


@pytest.mark.one_day_in(2)
def test_random_regions() -> None:
    with jax.enable_x64(True):
        found = [differences(seed) for seed in SEEDS]
    assert sum(len(made) for made, _ in found) >= len(SEEDS)
    assert max(worst for _, worst in found) <= 1
