"""The fit finds what was planted, and never a negative figure."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jscaler.clusters import Cluster, Link
from jscaler.clusters.calibration import MEASURED, Sample, fit_all, fit_link, fitted_cluster, fitted_seconds, relative_error

SIZES = (1e3, 3e4, 1e6, 3e7)
latencies, bandwidths = st.floats(1e-7, 1e-3), st.floats(1e8, 1e12)


def planted(link: Link, link_class: str = "inside", sharing: int = 1, noise: float = 0.0) -> list[Sample]:
    """Samples of every collective that take what ``link`` says, up to a factor within ``1 ± noise``."""
    random = np.random.default_rng(0)
    samples = [
        Sample(link_class, kind, members, sharing, nbytes, 1.0)  # pyright: ignore
        for kind in MEASURED
        for members in (2, 4, 8)
        for nbytes in SIZES
    ]
    return [s._replace(seconds=fitted_seconds(link, s) * (1 + noise * random.uniform(-1, 1))) for s in samples]


@given(latencies, bandwidths, st.integers(1, 8))
def test_planted_figures_are_found(latency: float, bandwidth: float, sharing: int) -> None:
    found = fit_link(planted(Link(latency, bandwidth), sharing=sharing))
    samples = planted(Link(latency, bandwidth), sharing=sharing)
    # each figure by itself is found where it shows in any message at all
    assert max(abs(relative_error(found, s)) for s in samples) < 1e-6
    if latency * bandwidth > 1e-3 * SIZES[0]:
        assert found.latency == pytest.approx(latency, rel=1e-3)
    if latency * bandwidth < 1e3 * SIZES[-1]:
        assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)


@given(st.floats(1e-6, 1e-4), st.floats(1e9, 1e11))
def test_noise_moves_them_no_more_than_itself(latency: float, bandwidth: float) -> None:
    found = fit_link(planted(Link(latency, bandwidth), noise=0.2))
    assert found.latency == pytest.approx(latency, rel=0.2)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.2)


def test_too_fast_and_too_slow_count_alike() -> None:
    """One message took half of what the other did: the fit is their geometric mean."""
    samples = [Sample("inside", "permute", 2, 1, 1e9, seconds) for seconds in (0.5, 2.0)]
    assert fitted_seconds(fit_link(samples), samples[0]) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-9, 10)), min_size=1, max_size=8))
def test_figures_are_positive_whatever_was_measured(measured: list[tuple[float, float]]) -> None:
    link = fit_link([Sample("inside", "permute", 2, 1, nbytes, seconds) for nbytes, seconds in measured])
    assert 0 < link.latency < 1e3
    assert 0 < link.bandwidth <= 1e15


def test_larger_messages_that_take_less_leave_the_bandwidth_open() -> None:
    link = fit_link([Sample("inside", "permute", 2, 1, 1e3, 2e-5), Sample("inside", "permute", 2, 1, 1e6, 1e-5)])
    assert link.bandwidth >= 1e14
    assert link.latency == pytest.approx(1.414e-5, rel=1e-2)


def test_each_class_and_each_collective_has_a_fit() -> None:
    inside, between = Link(1e-5, 1e10), Link(3e-5, 1e9)
    samples = planted(inside) + planted(between, "between", sharing=4)
    fits = fit_all(samples)
    assert [(f.link_class, f.kind) for f in fits] == [
        (link_class, kind) for link_class in ("inside", "between") for kind in (None, *MEASURED)
    ]
    for fit in fits:
        link = inside if fit.link_class == "inside" else between
        assert fit.link.latency == pytest.approx(link.latency)
        assert fit.link.bandwidth == pytest.approx(link.bandwidth)
        assert fit.error < 1e-9
    cluster = fitted_cluster(fits, "made", 2, 4, 7)
    assert (cluster.name, cluster.hosts, cluster.devices_per_host, cluster.memory) == ("made", 2, 4, 7)
    assert (cluster.inside.bandwidth, cluster.between.bandwidth) == pytest.approx((1e10, 1e9))


@pytest.mark.parametrize("link_class", ["inside", "between"])
def test_a_class_that_is_not_there_is_copied(link_class: str) -> None:
    cluster = fitted_cluster(fit_all(planted(Link(1e-5, 1e10), link_class)), "made", 1, 8)
    assert cluster.inside == cluster.between


@pytest.mark.parametrize("kind", sorted(set(MEASURED) - {"permute"}))
def test_the_fit_and_the_cluster_speak_of_the_same_model(kind: str) -> None:
    inside, between = Link(1e-5, 1e10), Link(3e-5, 1e9)
    cluster = Cluster("two hosts", 2, 4, inside, between)
    hosts = np.arange(8).reshape(2, 4)
    for link_class, link, groups, sharing in (("inside", inside, hosts, 1), ("between", between, hosts.T, 4)):
        sample = Sample(link_class, kind, groups.shape[1], sharing, 1e6, 1.0)  # pyright: ignore
        expected = cluster.collective(kind, groups).at(1e6) - cluster.local_step
        assert fitted_seconds(link, sample) == pytest.approx(expected)


def test_so_do_messages_around_a_ring() -> None:
    link = Link(3e-5, 1e9)
    cluster = Cluster("two hosts", 2, 4, Link(1e-5, 1e10), link)
    ring = np.array([(d, (d + 4) % 8) for d in range(8)])
    expected = cluster.messages(ring, 1e6, 8) - cluster.local_step
    assert fitted_seconds(link, Sample("between", "permute", 2, 4, 1e6, 1.0)) == pytest.approx(expected)
