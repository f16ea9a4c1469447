"""Collectives are really run and really timed; ``bench-comm`` from the devices to a file that is read back."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.clusters import find_cluster
from jscaler.clusters.calibration import MEASURED
from jscaler.clusters.measure import Trial, by_host, measure, program, sizes_up_to, trials
from jscaler.errors import DeviceError
from jscaler.report.hlo import collectives


class Device(NamedTuple):
    """As much of a device as sorting needs."""

    process_index: int
    id: int
    platform: str = "cuda"


def job(*counts: int) -> list[Device]:
    """Devices of one process after the other, in falling order."""
    ids = iter(range(sum(counts)))
    return [Device(process, next(ids)) for process, count in enumerate(counts) for _ in range(count)][::-1]


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench-comm", "--quick", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_devices_of_a_process_are_a_host() -> None:
    hosts = by_host(job(4, 4))
    assert hosts.shape == (2, 4)
    assert [[tuple(d[:2]) for d in row] for row in hosts] == [[(p, 4 * p + i) for i in range(4)] for p in range(2)]
    assert by_host(job(3, 2), of_each=2).shape == (2, 2)


@pytest.mark.parametrize(
    ("counts", "of_each", "message"),
    [
        ((1,), None, "needs 2 devices and 1 is at hand .*--platform cpu --devices 8"),
        ((4,), 1, "needs 2 devices and 1 is at hand"),
        ((4, 2), None, "equal numbers of devices and at hand are 4 of process 0, 2 of process 1; choose with --devices"),
        ((4, 2), 3, "3 devices of each process are asked for and at hand are 4 of process 0, 2 of process 1"),
    ],
)
def test_hosts_that_cannot_be_measured(counts: tuple[int, ...], of_each: int | None, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        by_host(job(*counts), of_each)


def test_sizes_span_decades() -> None:
    assert sizes_up_to(16 << 20) == [1 << n for n in range(10, 25, 2)]
    assert sizes_up_to(1 << 20, factor=32) == [1 << 10, 1 << 15, 1 << 20]
    assert sizes_up_to(1) == [1 << 10]


def test_every_collective_in_every_group_size_inside_and_across() -> None:
    hosts = by_host(job(4, 4))
    made = trials(hosts, [1024, 4096])
    assert Counter((t.link, t.groups.shape, t.sharing) for t in made) == dict.fromkeys(
        [("inside", (4, 2), 1), ("inside", (2, 4), 1), ("between", (4, 2), 4)], 2 * len(MEASURED)
    )
    for trial in made:
        processes = [{d.process_index for d in group} for group in trial.groups]
        assert all(len(p) == (1 if trial.link == "inside" else 2) for p in processes)
        assert sorted(d.id for d in trial.groups.flat) == list(range(8))


def test_group_sizes_divide_the_host() -> None:
    assert {t.groups.shape for t in trials(by_host(job(6)), [1024])} == {(3, 2), (2, 3), (1, 6)}
    assert {t.link for t in trials(by_host(job(1, 1)), [1024])} == {"between"}


@pytest.mark.parametrize("kind", MEASURED)
def test_the_program_holds_the_collective_in_its_loop(kind: str) -> None:
    """XLA neither drops nor moves it: the compiled loop runs it as often as it was asked to."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("groups", "members"))
    text = program(mesh, kind, 10).lower(jax.ShapeDtypeStruct((4 * 64,), "float32")).compile().as_text()
    name = "collective-permute" if kind == "permute" else kind.replace("_", "-")
    assert [(c.kind, c.sent) for c in collectives(text)] == [(name, MEASURED[kind].sent(2) * 64 * 4)]
    assert 'known_trip_count":{"n":"10"}' in text


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("members", [2, 4])
def test_a_sample_says_what_each_member_sent(kind: str, members: int) -> None:
    groups = np.array(jax.devices()[:4]).reshape(-1, members)
    sample = measure(Trial("inside", kind, groups, 1, 1 << 14), rounds=1)
    assert sample[:4] == ("inside", kind, members, 1)
    assert sample.nbytes == pytest.approx(1 << 14, rel=0.1)
    assert 1e-7 < sample.seconds < 1


@pytest.mark.one_day_in(2)
def test_bench_comm_from_devices_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "cluster.toml"
    output = bench("--devices", "2", "--out", str(path))
    for shown in ("all_to_all", "permute", "1.0 MiB", "one host: 'between' is a copy of 'inside'", "GB/s"):
        assert shown in " ".join(output.split())
    cluster = find_cluster(str(path))
    assert (cluster.name, cluster.hosts, cluster.devices_per_host) == ("cpu-1x2", 1, 2)
    assert cluster.inside == cluster.between
    text = path.read_text()
    assert "# measured by jscaler bench-comm on 2 × cpu" in text
    assert "# one host: 'between' is a copy of 'inside'" in text


@pytest.mark.one_day_in(3)
def test_bench_comm_as_json() -> None:
    record = json.loads(bench("--devices", "4", "--json"))
    assert record["cluster"]["devices_per_host"] == 4
    assert record["note"].startswith("one host")
    assert len(record["samples"]) == len(MEASURED) * 2 * 3
    assert {s["members"] for s in record["samples"]} == {2, 4}
    joint, *each = record["fits"]
    assert joint["collective"] is None
    assert [f["collective"] for f in each] == list(MEASURED)
    assert record["cluster"]["inside"] == {key: joint[key] for key in ("latency", "bandwidth")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "1"], "a collective needs 2 devices and 1 is at hand"),
        (["--devices", "9"], "9 devices are asked for and 8 are at hand"),
        (["--devices", "2", "--out", "cluster.json"], r"named \*.toml, not 'cluster.json'; give --out cluster.toml"),
        (["--platform", "tpu"], "no platform 'tpu'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        bench(*arguments)
