"""Hosts of several kinds and sizes: prices as of like hosts where these are, by hand where not; files and texts."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jscaler.clusters import Cluster, Link, UnlikeCluster, cluster_toml, find_cluster, joined, load_cluster
from jscaler.clusters.transition_kinds import COLLECTIVES
from jscaler.errors import DeviceError, UnknownNameError

LIKE = Cluster("lab", 3, 4, Link(1e-6, 1e9), Link(5e-6, 1e8))
IN_PARTS = joined("lab", [Cluster("one", 1, 4, LIKE.inside, LIKE.between), Cluster("two", 2, 4, LIKE.inside, LIKE.between)])
SLOW = Cluster("slow", 1, 4, Link(2e-6, 1e9), Link(9e-6, 1e7))
FAST = Cluster("fast", 2, 2, Link(1e-6, 4e9), Link(5e-6, 1e8))
BOTH = joined("both", [SLOW, FAST])  # hosts 0 1 2 3, 4 5, 6 7
MIXED = find_cluster("8xV100-32GB+4xA100-80GB")


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(COLLECTIVES)), st.sampled_from([2, 3, 4, 6, 12]))
def test_like_hosts_cost_the_same_in_parts(seed: int, kind: str, members: int) -> None:
    groups = np.random.default_rng(seed).permutation(12).reshape(-1, members)
    assert IN_PARTS.collective(kind, groups) == pytest.approx(LIKE.collective(kind, groups))
    assert IN_PARTS.crossing(kind, groups) == LIKE.crossing(kind, groups)
    pairs = groups.reshape(-1, 2)
    assert IN_PARTS.messages(pairs, 1e6, 12) == pytest.approx(LIKE.messages(pairs, 1e6, 12))
    assert IN_PARTS.floor(1e6) == LIKE.floor(1e6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_renumbered_devices_stand_to_each_other_as_before(seed: int, count: int) -> None:
    devices = sorted(np.random.default_rng(seed).choice(8, count, replace=False).tolist())
    numbers = BOTH.renumbered(devices)
    assert len(set(numbers)) == count
    assert BOTH.renumbered(numbers) == numbers
    pair = np.array([[0, -1]])
    ends = (np.array(own)[pair] for own in (devices, numbers))
    assert len({BOTH.messages(own, 1e6, 8) for own in ends}) == 1
    for kind in ("all_gather", "all_to_all"):
        first, second = (BOTH.collective(kind, np.array([own])) for own in (devices, numbers))
        assert first == pytest.approx(second)


def test_by_hand() -> None:
    """A ring from host to host goes through the slower of both networks; inside a host its own link counts."""
    fixed = BOTH.local_step
    assert BOTH.collective("all_gather", np.array([[4, 5]])) == pytest.approx((fixed + 1e-6, 1 / 4e9))
    assert BOTH.collective("all_gather", np.array([[0, 1]])) == pytest.approx((fixed + 2e-6, 1 / 1e9))
    assert BOTH.collective("all_gather", np.array([[4, 6]])) == pytest.approx((fixed + 5e-6, 1 / 1e8))
    assert BOTH.collective("all_gather", np.array([[0, 4]])) == pytest.approx((fixed + 9e-6, 1 / 1e7))
    two = np.array([[0, 4], [1, 6]])  # both leave the slow host, one each the fast ones
    assert BOTH.collective("all_gather", two) == pytest.approx((fixed + 9e-6, 2 / 1e7))
    assert BOTH.messages(np.array([[4, 6], [0, 5]]), 10.0, 8) == pytest.approx(fixed + 9e-6 + 10 / 1e7)
    assert BOTH.messages(two, 10.0, 8) == pytest.approx(fixed + 9e-6 + 20 / 1e7)
    said = joined("said", [SLOW, FAST], ((0, 1, Link(7e-6, 2e7)),))
    assert said.collective("all_gather", two) == pytest.approx((fixed + 7e-6, 2 / 2e7))
    assert said.collective("all_gather", np.array([[4, 6]])) == pytest.approx((fixed + 5e-6, 1 / 1e8))


def test_what_a_group_is() -> None:
    """As its slowest kind, with its smallest memory; the whole as any of its devices."""
    v100, a100 = find_cluster("8xV100-32GB"), find_cluster("4xA100-80GB")
    assert MIXED.of([0, 7]).device == v100.device
    assert (MIXED.of([8]).device, MIXED.of([8, 11]).memory) == (a100.device, a100.memory)
    assert (MIXED.of([7, 8]).device, MIXED.of([7, 8]).memory) == (v100.device, v100.memory) == (MIXED.device, MIXED.memory)
    assert [MIXED.of(own).interference for own in ([0], [8], [0, 8])] == [1.0, 1.189, 1.189]
    three = find_cluster("2xH100+1xA100-80GB+V100-32GB")
    assert three.of([0, 2]).device == a100.device
    assert three.num_devices == 4
    assert three.hosts_of(np.arange(4)).tolist() == [0, 0, 1, 2]
    assert str(MIXED.alone().device) == "V100-32GB"
    assert MIXED.alone().num_devices == 1
    assert MIXED.at_peaks().of([8]).device == a100.at_peaks().device
    assert MIXED.described_hosts() == "8 Tesla V100-SXM3-32GB, 4 NVIDIA A100-SXM4-80GB"
    unknown = joined("unknown", [a100, LIKE])
    assert (unknown.device, unknown.memory, unknown.of([0]).memory) == (None, 0, a100.memory)


def test_hosts_of_two_sizes_are_of_one_kind() -> None:
    sizes = find_cluster("8xA100-80GB+4xA100-80GB")
    assert isinstance(sizes, UnlikeCluster)
    assert sizes.of(range(12)).device == find_cluster("a100").device
    assert sizes.of([0]).between != sizes.of([8]).between, "each device has a network adapter"


FILE = """
name = "lab"
[[kinds]]
hosts = 1
devices_per_host = 8
device = "V100-32GB"
[[kinds]]
name = "new"
hosts = 2
devices_per_host = 4
[kinds.device]
like = "A100-80GB"
memory = 68_400_000_000
[kinds.inside]
latency = 9e-6
bandwidth = 25e9
[[across]]
kinds = [0, 1]
latency = 30e-6
bandwidth = 5e9
"""


def test_a_file_says_it_and_is_written_back(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(FILE)
    cluster = find_cluster(str(path))
    assert isinstance(cluster, UnlikeCluster)
    assert (cluster.name, cluster.num_devices, cluster.hosts) == ("lab", 16, 3)
    assert cluster.link(1, 0) == Link(30e-6, 5e9)
    assert cluster.kinds[1].between == find_cluster("4xA100-80GB").between
    assert cluster.of([9]).memory == 68_400_000_000
    copy = tmp_path / "copy.toml"
    copy.write_text(cluster_toml(cluster, ["measured"]))
    assert load_cluster(copy) == cluster
    copy.write_text(cluster_toml(MIXED))
    assert load_cluster(copy) == MIXED


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("hosts = 2\n", "", DeviceError, r"kinds 1: 'hosts' is missing"),
        ("bandwidth = 25e9\n", "", DeviceError, r"kinds 1: 'inside.bandwidth' is missing"),
        ("hosts = 1\n", "host = 1\n", UnknownNameError, r"no field named 'host' in .*kinds 0"),
        ("kinds = [0, 1]", "kinds = [0, 2]", DeviceError, r"the kinds \[0, 2\].* at most once: \[0, 1\]"),
        ("kinds = [0, 1]", "kinds = 1", DeviceError, r"across 0: 'kinds' is 1; give the numbers of two kinds"),
        ("latency = 30e-6", "latency = -1", DeviceError, r"across 0: 'latency' is -1"),
        ("bandwidth = 25e9", "bandwidth = 25", DeviceError, r"kinds 1: 'inside.bandwidth' is 25 bytes per second"),
        ('name = "lab"\n', 'name = "lab"\nhosts = 3\n', UnknownNameError, "no field named 'hosts'"),
        (FILE, "kinds = []", DeviceError, "'kinds' is empty"),
        (FILE, "kinds = 3", DeviceError, r"'kinds' is 3; give tables \[\[kinds\]\]"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(error, match=message):
        find_cluster(str(path))


@pytest.mark.parametrize("text", ["8xV100-32GB+", "8xV100-32GB+4xNothing", "+"])
def test_a_text_that_is_none(text: str) -> None:
    with pytest.raises(UnknownNameError):
        find_cluster(text)
