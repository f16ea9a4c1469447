"""The vocabulary in parts: one all-reduce of looked-up rows, a maximum and two sums per token, and no logits are sent."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import losing
from of_the_day import of_the_day
from plan_steps import activations, assert_same_numbers, collectives, gpt, planned

import jscaler
from jscaler import Split
from jscaler.errors import PlanWarning, UnknownNameError
from jscaler.plans import megatron, tensor_parallel, vocab_parallel


@pytest.mark.smoke
def test_logits_stay_where_they_are() -> None:
    plan = planned(vocab_parallel(), gpt(), 4)
    tokens, words = (8, 8), 32
    sent = [(kind, t.shape) for kind, t in collectives(plan)]
    assert sorted(sent) == sorted(
        [("all_reduce", (*tokens, 16))] * 2  # the rows that were looked up; the gradient of what the logits are made of
        + [("all_reduce", tokens)] * 3  # the largest logit, the sum of exponentials, the label's own logit
    )
    assert all(words not in shape for _, shape in sent)


def test_the_table_lies_in_rows() -> None:
    plan = planned(vocab_parallel(), gpt(), 4)
    layouts = [layout for t, layout in plan.completed.inputs.items() if t.name.endswith("embed/embedding")]
    assert len(layouts) == 2  # and its momentum
    assert all(layout.local_shape == (8, 16) for layout in layouts)


def test_a_pattern_is_of_parameters_and_state_of_other_dims_follows() -> None:
    plan = planned(vocab_parallel(), gpt(optax.adafactor(1e-2, min_dim_size_to_factor=8)), 4)
    rows = {t.name: layout.local_shape for t, layout in plan.completed.inputs.items() if t.name.endswith("embed/embedding")}
    sizes = {name.split("/")[-3]: shape for name, shape in rows.items()}
    assert sizes["params"] == (8, 16)
    assert (8,) in sizes.values(), "the factor that counts words lies in parts as they do"


def tied(look_up: int, logits: int) -> Any:
    """One use of the tied table split along one dim, and the other along another."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        for path, dim in (("embed/gather", look_up), ("embed.attend/dot", logits)):
            graph.op_assign(graph.op_trans(graph[path], Split(("embed/embedding", dim), devices.size)), devices)

    return policy


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_a_tied_table_that_is_split_in_two_ways_lies_in_one(dims: tuple[int, int]) -> None:
    plan = planned(tied(*dims), gpt(), 4)
    tables = [layout for t, layout in plan.completed.inputs.items() if t.name.endswith("embed/embedding")]
    assert len(set(tables)) == 1, "parameter and momentum"
    moved = [(kind, t.name.partition("@")[0]) for kind, t in collectives(plan) if t.shape == (32, 16)]
    # the table for its other use, and that use's gradient: they are joined once, where the parameter lies
    assert moved == [("all_to_all", "state/params/embed/embedding"), ("all_to_all", "d(state/params/embed/embedding)")]


ODD = functools.partial(gpt, vocabulary=33)  # on four devices 9, 9, 9 and 6 words


def test_words_that_do_not_divide_lie_in_parts_of_which_the_last_is_shorter() -> None:
    """What is sent is as ever, but that table and gradient are exchanged once: no array can lie as they are used."""
    plan = planned(vocab_parallel(), ODD(), 4)
    exchanged = [("all_to_all", "state/params/embed/embedding"), ("all_to_all", "d(state/params/embed/embedding)")]
    sent = [(kind, t.name) for kind, t in collectives(plan)]
    assert [one for one in sent if one[0] != "all_reduce"] == exchanged
    assert len(sent) == 5 + len(exchanged)
    tables = [layout for t, layout in plan.completed.inputs.items() if t.name.endswith("embed/embedding")]
    assert [layout.local_shape for layout in tables] == [(33, 4)] * 2, "parameter and momentum"
    logits = plan.completed.ops["embed.attend/dot"].outputs[0]
    assert (logits.local_shape, logits.block_sizes(2)) == ((8, 8, 9), (9, 9, 9, 6))
    assert logits.uneven == (), "the collectives are those of equal parts, padded"


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("plan", "devices"), of_the_day([(vocab_parallel(), 4), (megatron(dp=2, tp=4, zero=3), 8), (tensor_parallel(), 4)], 3)
)
def test_odd_words_give_the_numbers_of_one_device(plan: Any, devices: int) -> None:
    assert_same_numbers(plan, ODD, devices)


def test_a_table_with_too_few_words_stays_whole_and_is_named() -> None:
    with pytest.warns(
        PlanWarning, match=r"8 devices cannot have a part each: 'state/params/embed/embedding' of \(33, 16\)"
    ):
        planned(vocab_parallel(), ODD(), 8)


@losing
def test_a_tied_table_that_is_split_in_two_ways_gives_the_numbers_of_one_device() -> None:
    assert_same_numbers(tied(1, 0), gpt, 4)


def test_with_heads_units_and_sequence() -> None:
    plan = planned(megatron(tp=4, sequence=True), gpt(), 4)
    # per layer two each way, the logits' one, and the embedding's: forward it is scattered, backward gathered
    assert activations(plan)["reduce_scatter"] == 6
    assert activations(plan)["all_gather"] == 6


@pytest.mark.parametrize("plan", of_the_day([vocab_parallel(), megatron(dp=2, tp=4, sequence=True)], 2))
def test_the_numbers_are_those_of_one_device(plan: object) -> None:
    assert_same_numbers(plan, gpt, 8)


def test_a_penalty_on_kernels_looks_nothing_up() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(kernels: Any) -> Any:
            penalty = sum(jnp.sum(jnp.square(kernel)) for kernel in kernels)
            return jnp.mean((batch @ kernels[0] @ kernels[1]) ** 2) + 1e-4 * penalty

        return [kernel - 0.1 * grad for kernel, grad in zip(state, jscaler.grad(loss)(state), strict=True)]

    with pytest.raises(UnknownNameError, match="pass vocab_parallel"):
        planned(vocab_parallel(), (step, ([jnp.ones((8, 8)), jnp.ones((8, 8))], jnp.ones((4, 8)))), 4)


def test_mistakes() -> None:
    with pytest.raises(UnknownNameError, match=r"pass vocab_parallel\(vocabulary=\.\.\.\)"):
        planned(vocab_parallel({"*/words": 0}), gpt(), 4)
