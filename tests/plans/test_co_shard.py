"""Co-shard: parts of heads, units and tokens on one device after another, with one device's numbers."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day
from plans.plan_steps import TX, activations, assert_same_numbers, gpt, gpt_nnx, made_once, planned, with_arguments

import jscaler
from jscaler import PlanError, SplitError, UnknownNameError
from jscaler.plans import accumulate, co_shard, megatron, pipeline, tensor_parallel
from jscaler.primitives.plan import Recompute
from tests.capture.user_ops import attend_op

STACKED = functools.partial(gpt, layers=2, stacked=True)


class Attention(nn.Module):
    """An attention core with a rule and a derivative of its own, whose residuals are saved."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [nn.DenseGeneral((4, 3), param_dtype=x.dtype, name=name)(x) for name in ("query", "key", "value")]
        y = nn.DenseGeneral(8, axis=(-2, -1), param_dtype=x.dtype, name="out")(attend_op(*heads))
        return (x + y).mean(1)


@made_once
def attention() -> Any:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(4, 4, 8)).astype(jnp.zeros(()).dtype)
    return with_arguments(Attention(), TX, {"x": x, "labels": draws.integers(0, 8, 4)}, x)


USER = ("*query/kernel", "*key/kernel", "*value/kernel")
CASES: dict[str, tuple[Any, Any, int]] = {
    "alone": (co_shard(2), gpt, 1),
    "without recompute": (co_shard(4, recompute=False, loss=False), gpt, 1),
    "tensor parallel": (co_shard(2, plan=tensor_parallel()), gpt, 2),
    "in micro-batches, over layers": (accumulate(2, co_shard(2, plan=tensor_parallel())), STACKED, 2),
    "dp and tp": (co_shard(2, plan=megatron(dp=2, tp=2)), gpt, 4),
    "dp, tp and stages": (pipeline(2, 2, plan=co_shard(2, plan=megatron(dp=2, tp=2))), STACKED, 8),
    "nnx": (co_shard(2), gpt_nnx, 1),
    "checkpointed layers": (co_shard(2), functools.partial(STACKED, remat=True), 1),
    "user op": (co_shard(2, on=USER, loss=False), attention, 1),
    "user op in micro-batches": (accumulate(2, co_shard(2, on=USER, loss=False)), attention, 1),
}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", of_the_day(CASES))
def test_numbers(name: str) -> None:
    assert_same_numbers(*CASES[name])


@pytest.mark.smoke
def test_tensor_parallel_sums_stay_shares_until_the_loop_has_ended() -> None:
    alone = activations(planned(tensor_parallel(), gpt(), 2))
    both = activations(planned(co_shard(2, loss=False, recompute=False, plan=tensor_parallel()), gpt(), 2))
    assert both == alone


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("make", [functools.partial(gpt, layers=2), STACKED], ids=["loop", "scan"])
def test_it_recomputes_in_place_of_the_models_own_checkpoints(make: Any) -> None:
    plain, checkpointed = (planned(co_shard(2), make(remat=remat), 1) for remat in (False, True))
    assert any(decision.instead for decision in checkpointed.plan.decisions if isinstance(decision, Recompute))
    clones = [sorted(op.name for op in plan.graph.ops if op.again is not None) for plan in (plain, checkpointed)]
    assert clones[0] == clones[1] != []
    assert len(plain.graph.loops) == len(checkpointed.graph.loops)


def test_a_checkpoint_that_holds_more_than_is_co_sharded_stays() -> None:
    plan = planned(co_shard(2, on=("*/mlp/up/kernel",)), gpt(layers=2, remat=True), 1)
    assert not any(decision.instead for decision in plan.plan.decisions if isinstance(decision, Recompute))
    assert any(op.remat for op in plan.graph.ops if op.path.endswith("attn/out/dot"))


def test_parts_that_do_not_divide() -> None:
    with pytest.raises(SplitError):
        planned(co_shard(3), gpt(), 1)
    with pytest.raises(
        SplitError, match=r"of size 1 into 2 parts; legal: 1, since it is split already: .:4 in time \(co_shard\)"
    ):
        planned(co_shard(4, plan=tensor_parallel()), gpt(), 2)


@pytest.mark.parametrize("parts", [0, -1, 1.5])
def test_parts_are_a_positive_number(parts: Any) -> None:
    with pytest.raises(PlanError, match="positive"):
        co_shard(parts)


def test_kernels_that_are_not_there() -> None:
    with pytest.raises(UnknownNameError):
        planned(co_shard(2, on=("*/no_such/kernel",)), gpt(), 1)


@pytest.mark.one_day_in(3)
def test_dropout_masks_are_those_of_one_device() -> None:
    made = gpt(dropout=0.5)
    step, arguments = made
    lowered = jscaler.parallelize(co_shard(2), devices=1)(step).lower(*arguments)
    ours = lowered.compile()(*arguments)
    assert np.isclose(float(ours[1]), float(jax.jit(step)(*arguments)[1]), rtol=1e-5)
