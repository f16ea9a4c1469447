"""Every cost model keeps what the search relies on: a floor that no step undercuts, and equality by value."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jscaler.clusters import BYTES, CLUSTERS, FEW_STEPS, Cluster, CostModel, Line, Link
from jscaler.clusters.transition_kinds import COLLECTIVES

links = st.builds(Link, st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
clusters = st.builds(Cluster, st.just("any"), st.integers(1, 4), st.integers(1, 8), links, links)
models = st.one_of(st.just(BYTES), st.sampled_from(list(CLUSTERS.values())), clusters)


@st.composite
def groupings(draw: st.DrawFn) -> np.ndarray:
    """Disjoint groups of equal size, of devices in any order."""
    members = draw(st.integers(1, 8))
    count = draw(st.integers(1, 4))
    return np.array(draw(st.permutations(range(32)))[: members * count]).reshape(count, members)


@given(models, groupings(), st.sampled_from(sorted(COLLECTIVES)), st.floats(1, 1e9))
def test_no_collective_costs_less_than_the_floor(model: CostModel, groups: np.ndarray, kind: str, x: float) -> None:
    sent = COLLECTIVES[kind].sent(groups.shape[1]) * x
    cost = model.collective(kind, groups).at(sent)
    assert cost >= model.local_step > 0
    assert cost >= model.floor(sent) * (1 - 1e-12)


@given(models, st.integers(0, 16), st.randoms(use_true_random=False), st.floats(1, 1e9))
def test_no_round_of_messages_costs_less_than_the_floor(model: CostModel, count: int, random: object, x: float) -> None:
    senders, receivers = (np.array(random.sample(range(32), count), int) for _ in range(2))  # pyright: ignore
    pairs = np.stack([senders, receivers], axis=1)
    mean = x * len(pairs) / 32
    cost = model.messages(pairs, x, 32)
    assert cost >= model.local_step
    assert cost >= model.floor(mean) * (1 - 1e-12)


@given(clusters, groupings(), st.sampled_from(sorted(COLLECTIVES)), st.floats(1, 1e9))
def test_a_group_alone_is_no_slower_than_with_others(cluster: Cluster, groups: np.ndarray, kind: str, x: float) -> None:
    together = cluster.collective(kind, groups).at(x)
    assert all(cluster.collective(kind, groups[i : i + 1]).at(x) <= together * (1 + 1e-12) for i in range(len(groups)))


def test_bytes_count_what_devices_send_in_the_mean() -> None:
    groups = np.arange(8).reshape(2, 4)
    assert BYTES.collective("all_gather", groups).at(300) == 300 + BYTES.local_step
    assert BYTES.messages(np.array([[0, 1], [2, 3]]), 400, 8) == 100 + BYTES.local_step
    assert BYTES.messages(np.empty((0, 2), int), 400, 8) == BYTES.local_step
    assert BYTES.floor(300) == 300 + BYTES.launch
    assert BYTES.floor(0) == 0


def test_a_launch_counts_for_bytes() -> None:
    groups = np.arange(8).reshape(2, 4)
    assert FEW_STEPS.collective("all_gather", groups).at(300) == 300 + 2**16
    assert FEW_STEPS.messages(np.array([[0, 1], [2, 3]]), 400, 8) == 100 + 2**16
    assert FEW_STEPS.messages(np.empty((0, 2), int), 400, 8) == FEW_STEPS.local_step
    assert FEW_STEPS != BYTES


def test_a_line() -> None:
    assert Line(2.0, 0.5).at(8) == 6.0
    assert Line(2.0, 0.5).at(0) == 2.0


def test_models_are_keys_by_value() -> None:
    cluster = CLUSTERS["h100"]
    same = dataclasses.replace(cluster)
    assert same is not cluster
    assert {cluster: 1}[same] == 1
    assert type(BYTES)() == BYTES
    assert hash(type(BYTES)()) == hash(BYTES)
    assert len({BYTES, *CLUSTERS.values()}) == 1 + len(CLUSTERS)
    assert cluster != BYTES
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.hosts = 2  # pyright: ignore


def test_names_and_pictures() -> None:
    assert repr(BYTES) == "Bytes(launch=0.001)"
    assert BYTES.name == "bytes"
    assert str(CLUSTERS["a100"]) == "a100"
