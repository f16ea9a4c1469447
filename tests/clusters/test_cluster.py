"""Seconds of a cluster by hand, what crosses hosts by counting messages."""

import itertools
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jscaler.clusters import CLUSTERS, Cluster, Link, find_cluster
from jscaler.clusters.transition_kinds import COLLECTIVES
from jscaler.errors import UnknownNameError

# 4 hosts × 8; a byte takes 1 ns inside a host, 10 ns between hosts
LAB = Cluster("lab", 4, 8, Link(1e-6, 1e9), Link(5e-6, 1e8))
X = 1e6
HOSTS = np.arange(32).reshape(4, 8)


def seconds(kind: str, groups: np.ndarray) -> float:
    """Of ``kind`` when each member holds ``X`` bytes before it, less the price of a local step."""
    sent = COLLECTIVES[kind].sent(groups.shape[1]) * X
    return LAB.collective(kind, groups).at(sent) - LAB.local_step


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 3 * 1e-6 + 7 * X / 1e9),
        ("all_reduce", 6 * 1e-6 + 2 * 7 / 8 * X / 1e9),
        ("reduce_scatter", 3 * 1e-6 + 7 / 8 * X / 1e9),
        ("all_to_all", 1 * 1e-6 + 7 / 8 * X / 1e9),
        ("slice", 0.0),
        ("value_mask", 0.0),
    ],
)
def test_inside_hosts_groups_do_not_disturb_each_other(kind: str, expected: float) -> None:
    assert seconds(kind, HOSTS) == pytest.approx(expected)
    assert seconds(kind, HOSTS[1:2]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 2 * 5e-6 + 8 * 3 * X / 1e8),
        ("all_reduce", 4 * 5e-6 + 8 * 2 * 3 / 4 * X / 1e8),
        ("reduce_scatter", 2 * 5e-6 + 8 * 3 / 4 * X / 1e8),
        ("all_to_all", 1 * 5e-6 + 8 * 3 / 4 * X / 1e8),
    ],
)
def test_eight_groups_across_all_hosts_share_each_hosts_network(kind: str, expected: float) -> None:
    assert seconds(kind, HOSTS.T) == pytest.approx(expected)


def test_one_group_across_hosts_has_the_network_to_itself() -> None:
    assert seconds("reduce_scatter", HOSTS.T[:1]) == pytest.approx(2 * 5e-6 + 3 / 4 * X / 1e8)


def test_a_ring_over_all_devices_crosses_into_each_host_once() -> None:
    assert seconds("all_gather", HOSTS.reshape(1, 32)) == pytest.approx(5 * 5e-6 + 31 * X / 1e8)


def test_an_all_to_all_over_all_devices_sends_most_of_it_across() -> None:
    each_to_each = X / 32
    assert seconds("all_to_all", HOSTS.reshape(1, 32)) == pytest.approx(5e-6 + 8 * 24 * each_to_each / 1e8)


def test_a_network_faster_than_the_devices_does_not_speed_them_up() -> None:
    cluster = Cluster("fast network", 2, 1, Link(1e-6, 1e9), Link(5e-6, 1e12))
    assert cluster.collective("all_gather", np.array([[0, 1]])).per_byte == 1e-9


@given(st.permutations(range(32)), st.sampled_from([(1, 32), (2, 16), (3, 4), (8, 4), (5, 3), (4, 1)]))
def test_an_all_to_all_crosses_as_often_as_its_messages_do(devices: list[int], shape: tuple[int, int]) -> None:
    count, members = shape
    groups = np.array(devices[: count * members]).reshape(shape)
    leaving: Counter[int] = Counter()
    for group in groups.tolist():
        leaving.update(a // 8 for a, b in itertools.permutations(group, 2) if a // 8 != b // 8)
    line = LAB.collective("all_to_all", groups)
    if not leaving:
        assert line.per_byte in (0.0, 1e-9)  # of groups of one, or inside hosts
        return
    each_to_each = 1 / (members - 1)  # of a byte that each member sends
    assert line.per_byte == pytest.approx(max(1e-9, max(leaving.values()) * each_to_each / 1e8))


@given(st.permutations(range(32)), st.permutations(range(32)), st.integers(0, 32))
def test_messages_wait_for_the_busiest_direction_of_a_host(to: list[int], order: list[int], count: int) -> None:
    pairs = [(a, to[a]) for a in order[:count]]
    across = [(a // 8, b // 8) for a, b in pairs if a // 8 != b // 8]
    busiest = max((Counter(side).most_common(1)[0][1] for side in zip(*across, strict=True)), default=0)
    slowest = max(1e-9, busiest * 1e-8)
    latency = 5e-6 if across else 1e-6
    expected = LAB.local_step + (latency + slowest * X if pairs else 0.0)
    assert LAB.messages(np.array(pairs, int).reshape(-1, 2), X, 32) == pytest.approx(expected)


@given(st.permutations(range(32)), st.sampled_from([(1, 2), (2, 2), (2, 4), (4, 3)]), st.sampled_from(sorted(COLLECTIVES)))
def test_devices_that_stand_to_one_another_alike_cost_the_same(order: list[int], shape: tuple[int, int], kind: str) -> None:
    devices = order[: shape[0] * shape[1]]
    number = dict(zip(devices, LAB.renumbered(devices), strict=True))
    assert set(number.values()) <= set(range(32))
    assert LAB.renumbered(tuple(number.values())) == tuple(number.values())
    assert all((a // 8 == b // 8) == (number[a] // 8 == number[b] // 8) for a, b in itertools.combinations(devices, 2))
    old, new = (np.array(some).reshape(shape) for some in (devices, list(number.values())))
    assert LAB.collective(kind, old) == LAB.collective(kind, new)
    pairs = [np.stack([some[0], np.roll(some[0], 1)], axis=1) for some in (old, new)]
    assert LAB.messages(pairs[0], X, 32) == LAB.messages(pairs[1], X, 32)


@pytest.mark.parametrize("name", CLUSTERS)
def test_built_in_clusters_are_plausible(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name
    for link in (cluster.inside, cluster.between):
        assert 1e-7 < link.latency < 1e-3
        assert 1e8 < link.bandwidth < 1e12
    assert cluster.between.latency >= cluster.inside.latency
    groups = np.arange(cluster.devices_per_host)[None]
    assert cluster.collective("all_reduce", groups).at(1e6) > cluster.floor(1e6) > 0
    assert hash(cluster) == hash(find_cluster(name))


def test_the_papers_cluster_has_one_slow_adapter_per_host() -> None:
    cluster = find_cluster("v100-nvlink-ib100").at_peaks()
    inside, across = (cluster.collective("all_reduce", g).per_byte for g in (HOSTS, HOSTS.T))
    assert across == pytest.approx(8 / 12.5e9)
    assert across / inside == pytest.approx(96)


def test_a_described_cluster_has_the_links_that_are_usual_for_its_kind() -> None:
    paper, described = find_cluster("v100-nvlink-ib100"), find_cluster("4x8xV100-32GB")
    assert (described.hosts, described.devices_per_host, described.num_devices) == (4, 8, 32)
    assert (described.inside, described.between, described.device) == (paper.inside, paper.between, paper.device)
    assert described.memory == 34_089_730_048
    small = find_cluster("4xH100")
    assert (small.hosts, small.name, small.device) == (1, "4xH100", find_cluster("h100").device)
    assert small.between.bandwidth == find_cluster("h100").between.bandwidth / 2  # an adapter for each device


def test_memory_may_be_less_than_the_device_s() -> None:
    assert Cluster("shared", 1, 8, LAB.inside, LAB.between, 60 * 10**9, find_cluster("h100").device).memory == 60 * 10**9


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no cluster named 'a10' \(or .*\.toml file\); did you mean 'a100'"):
        find_cluster("a10")
