"""Stages on unlike groups of devices: cuts against all cuts, by what a step takes; and the numbers of one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from of_the_day import of_the_day
from plans.test_stacked_pipeline import UP, check_plan, inputs, make_state, step

import jscaler
from jscaler import PlanError, SplitError, plans
from jscaler.clusters import find_cluster, joined
from jscaler.ir import Graph
from models.gpt import GPT, GPTConfig
from models.training import evaluation_of, language_loss, train_step_on
from models.training import make_state as make_gpt_state

BOTH = find_cluster("1xV100-32GB+1xA100-80GB")
LAYERS, ROWS, TOKENS = 8, 32, 256


def gpt_arguments(stacked: bool) -> tuple[Any, Any]:
    config = GPTConfig(512, LAYERS, 16, TOKENS, dropout=0.0, dtype=jnp.float16, stacked=stacked)
    state = jax.eval_shape(lambda: make_gpt_state(GPT(config), TOKENS, optax.sgd(1e-3)))
    return state, {name: jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32) for name in ("tokens", "labels")}


@functools.cache
def gpt(stacked: bool) -> Graph:
    return jscaler.parallelize("single", devices=1)(train_step_on(language_loss)).graph(*gpt_arguments(stacked))


def cut_behind(stacked: bool, layers: int) -> dict[str, Any]:
    return {"layers": [layers, LAYERS - layers]} if stacked else {"at": [f"block_{layers}"]}


def priced(stacked: bool, cluster: Any = BOTH, stages: Any = 2, **more: Any) -> jscaler.Cost:
    plan = None if stages == 2 else plans.data_parallel()
    return jscaler.cost(gpt(stacked), plans.pipeline(stages, 4, plan=plan, **more), cluster)


@pytest.mark.parametrize(
    ("stacked", "cluster", "stages"),
    [
        (True, BOTH, 2),
        pytest.param(False, BOTH, 2, marks=pytest.mark.one_day_in(3)),
        (True, find_cluster("8xV100-32GB+4xA100-80GB"), [8, 4]),
        (True, find_cluster("8xA100-80GB+4xA100-80GB"), [8, 4]),
    ],
    ids=["stack", "row", "two kinds of two sizes", "two sizes"],
)
def test_cuts_are_as_fast_as_the_fastest_of_all(stacked: bool, cluster: Any, stages: Any) -> None:
    """A loop's are those between its layers; layers in a row may be cut inside, which is faster still."""
    found = priced(stacked, cluster, stages)
    every = [priced(stacked, cluster, stages, **cut_behind(stacked, n)).seconds.total or 0.0 for n in range(1, LAYERS)]
    assert found.seconds.total is not None
    assert found.seconds.total <= min(every) * (1 + 1e-9)
    assert jscaler.simulate(found.step, cluster).makespan == pytest.approx(found.seconds.total)
    if stacked:
        assert found.seconds.total == pytest.approx(min(every), rel=1e-9)


def test_each_stage_is_priced_and_fits_by_its_own_device() -> None:
    halves = cut_behind(True, 4)
    both, *alike = (priced(True, on, **halves) for on in (BOTH, "2xV100-32GB", "2xA100-80GB"))
    assert [share.compute for share in both.shares] == [one.shares[n].compute for n, one in enumerate(alike)]
    assert [one.memory.capacity for one in both.by_devices] == [part.memory for part in BOTH.kinds]
    most = [one.memory.peak for one in both.by_devices]
    for small in range(2):
        parts = [dataclasses.replace(p, memory=most[n] - (n == small)) for n, p in enumerate(BOTH.kinds)]
        short = priced(True, joined("short", parts), **halves)
        assert (short.fits, short.held.devices) == (False, (small,))
    assert priced(
        True, joined("just", [dataclasses.replace(p, memory=n) for n, p in zip(most, BOTH.kinds, strict=True)]), **halves
    ).fits


def test_a_cut_that_fits_is_taken_before_a_faster_one() -> None:
    fastest = priced(True)
    slow, fast = (one.memory.peak for one in fastest.by_devices)
    parts = [dataclasses.replace(BOTH.kinds[0], memory=slow - 1), dataclasses.replace(BOTH.kinds[1], memory=2 * fast)]
    found = priced(True, joined("tight", parts))
    assert (fastest.fits, found.fits) == (True, True)
    assert (found.seconds.total or 0.0) > (fastest.seconds.total or 0.0)


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.one_day_in(3))])
def test_an_evaluation_is_cut_where_the_layers_lie(stacked: bool) -> None:
    """Its own balance, of forwards alone, is another; but then parameters would be sent each time."""
    plan, arguments = plans.pipeline([2, 1], 4, plan=plans.data_parallel()), gpt_arguments(stacked)
    train = jscaler.parallelize(plan, devices=3, cluster="2xV100-32GB+1xA100-80GB")(train_step_on(language_loss))
    train.lower(*arguments)
    sent = train.follow(evaluation_of(language_loss)).lower(*arguments).plan.sent
    leaves = [one.tensor.name for one in sent if "params" in one.tensor.name]
    assert leaves == ["state/params/embed/embedding"], "which the logits read, too"


CASES = {  # plan -> devices
    "pipeline([4, 2], 2, plan=data_parallel('x'), batch='x')": 6,
    "pipeline([3, 1], 2, batch='x')": 4,
    "pipeline([2, 1, 2], 4, 'gpipe', plan=data_parallel('x'), batch='x')": 5,
    f"pipeline([1, 4], 2, plan=tensor_parallel({UP}), batch='x', layers=[1, 3])": 5,
    f"pipeline([4, 2], 2, plan=megatron(tp=2, {UP}, vocab=False, batch='x'), batch='x')": 6,
    "pipeline([2, 1], 2, plan=zero1('x'), batch='x')": 3,
    "pipeline([4, 2], 2, plan=zero3('x'), batch='x')": 6,
    "pipeline([2, 1], 4, 'interleaved', chunks=2, plan=data_parallel('x'), batch='x')": 3,
    "pipeline([2, 1], 4, 'zb_v', plan=data_parallel('x'), batch='x')": 3,
    "pipeline([[2, 0], [1]], 2, plan=recompute_layers(data_parallel('x')), batch='x')": 3,
    "pipeline([4, 2], 4, plan=co_shard(2, on={'*/up': 2}, loss=False), batch='x')": 6,
}


@pytest.mark.parametrize("name", of_the_day(CASES, 3, always=list(CASES)[:1]))
def test_groups_of_several_sizes_have_the_numbers_of_one_device(name: str) -> None:
    check_plan(name, CASES[name])


def test_a_stack_lies_in_chunks_on_its_groups() -> None:
    train = jscaler.parallelize("pipeline([[2, 0], [1]], 2, layers=[3, 1], batch='x')", devices=3)(step)
    leaf = train.init(make_state, 4, x=inputs())[0]["layers"]["up"]
    assert isinstance(leaf, jscaler.ChunkedArray)
    lies = {shard.device.id: shard.index[0].indices(4)[:2] for shard in leaf.addressable_shards}
    assert lies == {2: (0, 3), 0: (0, 3), 1: (3, 4)}


@pytest.mark.parametrize(
    ("stages", "devices", "error", "message"),
    [
        ([4, 2], 8, PlanError, r"stages=\[4, 2\] are 6 devices, and there are 8: 0 to 7; .*as with \[4, 4\]"),
        ([[0, 1], [1]], 3, PlanError, r"there are 3: 0 to 2; each is in one group, as with \[2, 1\]"),
        (2, 3, PlanError, r"3 devices do not divide into 2 stages; legal: \[1, 3\], or the sizes .* such as \[2, 1\]"),
        ([2, [1]], 3, PlanError, r"are a number of groups, the sizes .*, not \[2, \[1\]\]"),
        ([], 3, PlanError, "not \\[\\]"),
        ([2, 0], 2, PlanError, r"not \[2, 0\]"),
        (
            [3, 1],
            4,
            SplitError,
            r"16 into 3 parts; legal: 1, 2, 4, 8, 16; .*groups have 3 and 1 devices, .* on \[0, 1, 2\]",
        ),
    ],
)
def test_groups_that_are_none(stages: Any, devices: int, error: type[Exception], message: str) -> None:
    def lowered() -> Any:
        policy = plans.pipeline(stages, 2, plan=plans.data_parallel("x"), batch="x")
        return jscaler.parallelize(policy, devices=devices)(step).lower(make_state(4), inputs())

    with pytest.raises(error, match=message):
        lowered()


def test_micro_batches_take_turns_on_groups_of_one_size_alone() -> None:
    with pytest.raises(PlanError, match="groups have 2, 1 devices, and under 'chimera' micro-batches take turns"):
        jscaler.parallelize("pipeline([2, 1], 2, 'chimera', batch='x')", devices=3)(step).lower(make_state(4), inputs())
