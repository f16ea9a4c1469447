"""Cluster files: what they say, what may be left out, and every mistake in them."""

import dataclasses
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jscaler.clusters import CLUSTERS, DEVICE_KINDS, Cluster, Link, cluster_toml, find_cluster, load_cluster
from jscaler.errors import DeviceError, JscalerError, UnknownNameError

GOOD = """
name = "lab"
hosts = 4
devices_per_host = 8
memory = 34_089_730_048
[inside]
latency = 1e-6
bandwidth = 1e9
[between]
latency = 5e-6
bandwidth = 100_000_000
"""


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    expected = Cluster("lab", 4, 8, Link(1e-6, 1e9), Link(5e-6, 1e8), 34_089_730_048)
    assert load_cluster(path) == find_cluster(str(path)) == expected


def test_interference_is_that_of_a_like_device_or_said_or_none(tmp_path: Path) -> None:
    head = "hosts = 1\ndevices_per_host = 1\n[device]\n"
    path, copy = tmp_path / "lab.toml", tmp_path / "copy.toml"
    for like, line, expected in (("H200", "", 1.189), ("V100-32GB", "", 1.0), ("H200", "interference = 1.5", 1.5)):
        path.write_text(f'{head}name = "own"\nlike = "{like}"\n[device.reached]\n{line}\n')
        copy.write_text(cluster_toml(load_cluster(path)))
        assert load_cluster(copy) == load_cluster(path)
        assert load_cluster(copy).interference == expected
        assert load_cluster(copy).at_peaks().interference == 1
    path.write_text("".join(line for line in copy.read_text().splitlines(True) if "interference" not in line))
    assert load_cluster(path).interference == 1, "nobody says"
    path.write_text(GOOD)
    assert load_cluster(path).interference == 1, "nobody says what its devices are"


def test_name_and_memory_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "attic.toml"
    path.write_text("\n".join(GOOD.splitlines()[2:4] + GOOD.splitlines()[5:]))
    assert load_cluster(path) == Cluster("attic", 4, 8, Link(1e-6, 1e9), Link(5e-6, 1e8))


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20),
    st.tuples(st.integers(1, 99), st.integers(1, 99), st.integers(0, 1 << 40)),
    st.tuples(*[st.floats(1e-9, 1e15)] * 4),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, counts: tuple[int, int, int], figures: tuple[float, ...]
) -> None:
    cluster = Cluster(name, *counts[:2], Link(*figures[:2]), Link(*figures[2:]), counts[2])
    path = tmp_path_factory.mktemp("cluster") / "made.toml"
    path.write_text(cluster_toml(cluster, ["measured by hand", "two lines"]), encoding="utf-8")
    assert load_cluster(path) == cluster


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=str)
def test_built_in_clusters_survive_a_file(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(cluster_toml(cluster))
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bandwidth = 3800", "'device.reached.bandwidth' is 3800 bytes per second; give 1e.06 to 1e.15"),
        ("launch = 2.5", "'device.reached.launch' is 2.5 seconds; give 0 to 1"),
        ("interference = 0.5", "'device.reached.interference' is 0.5 times as long; give 1 to 100"),
        ("[device.reached.products]\nfloat16 = 668", "'device.reached.products.float16' is 668 FLOP/s; give 1e.06"),
    ],
)
def test_what_is_reached_in_another_unit_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(f'hosts = 1\ndevices_per_host = 1\n[device]\nlike = "H200-141GB"\n[device.reached]\n{line}\n')
    with pytest.raises(DeviceError, match=message):
        find_cluster(str(path))


def test_a_type_that_the_kind_it_is_like_lacks_reaches_the_usual_share(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('hosts = 1\ndevices_per_host = 1\n[device]\nlike = "A100-40GB"\n[device.peak]\nfloat8 = 6e14\n')
    device = load_cluster(path).device
    assert device is not None
    assert device.reached is not None
    assert device.reached.products.float8 == pytest.approx(6e14 * 230 / 312)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("[between]", "[betwen]", UnknownNameError, "no field named 'betwen' in .*did you mean 'between'"),
        (GOOD[GOOD.index("[between]") :], "", DeviceError, r"the table \[between\] with latency .* is missing"),
        ("hosts = 4", "inside = 3\nhosts = 4", DeviceError, "cannot read the cluster file"),
        ("devices_per_host", "device_per_host", UnknownNameError, "did you mean 'devices_per_host'"),
        ("hosts = 4\n", "", DeviceError, "'hosts' is missing; give a positive whole number"),
        ("hosts = 4", "hosts = 0", DeviceError, "'hosts' is 0; give a positive whole number"),
        ("hosts = 4", "hosts = 4.5", DeviceError, "'hosts' is 4.5; give a positive whole number"),
        ("hosts = 4", "hosts = true", DeviceError, "'hosts' is True; give a positive whole number"),
        ("34_089_730_048", "-1", DeviceError, "'memory' is -1; give a positive whole number"),
        ("latency = 5e-6", "latency = -5e-6", DeviceError, "'between.latency' is -5e-06; give a positive number"),
        ("latency = 5e-6", "latency = nan", DeviceError, "'between.latency' is nan; give a positive number"),
        ("bandwidth = 1e9", "bandwidth = inf", DeviceError, "'inside.bandwidth' is inf; give a positive number"),
        ("bandwidth = 1e9", 'bandwidth = "1 GB"', DeviceError, "'inside.bandwidth' is '1 GB'; give a positive number"),
        ("bandwidth = 1e9\n", "", DeviceError, "'inside.bandwidth' is missing; give a positive number"),
        ("bandwidth = 1e9", "bandwith = 1e9", UnknownNameError, "'inside.bandwith' in .*mean 'inside.bandwidth'"),
        ("hosts = 4", "hosts = ", DeviceError, "cannot read the cluster file .*bench-comm --out .* writes such a file"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, old: str, new: str, error: type[JscalerError], message: str) -> None:
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(error, match=message) as raised:
        load_cluster(path)
    assert str(path) in str(raised.value)


def test_a_table_that_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text("hosts = 1\ndevices_per_host = 2\ninside = 3\n[between]\nlatency = 1\nbandwidth = 1\n")
    with pytest.raises(DeviceError, match=r"the table \[inside\]"):
        load_cluster(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot read the cluster file nowhere\.toml: .*No such file"):
        find_cluster("nowhere.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceError, match=r"cannot read the cluster file .*binary\.toml"):
        load_cluster(path)


WITH_DEVICE = """
hosts = 2
devices_per_host = 4
[device]
name = "H100-64GB"
like = "H100-80GB"
capability = "9.0"
memory = 68_000_000_000
clock = 1.7
[device.peak]
float16 = 800e12
"""


def test_a_device_by_name_brings_its_memory_and_links(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('hosts = 4\ndevices_per_host = 8\ndevice = "V100-32GB"\n')
    assert load_cluster(path) == dataclasses.replace(find_cluster("4x8xV100-32GB"), name="lab")
    path.write_text(path.read_text() + "[between]\nlatency = 1e-5\nbandwidth = 1e9\n")
    assert load_cluster(path).between == Link(1e-5, 1e9)
    assert load_cluster(path).inside == find_cluster("4x8xV100-32GB").inside


def test_a_device_of_one_s_own_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(WITH_DEVICE)
    made, like = load_cluster(path), DEVICE_KINDS["H100-80GB"]
    peak = dataclasses.replace(like.peak, float16=800e12)
    assert like.reached is not None
    products = dataclasses.replace(like.reached.products, float16=like.reached.products.float16 * 800 / 989.4)
    reached = dataclasses.replace(like.reached, products=products)
    expected = {"name": "H100-64GB", "description": "H100-64GB", "memory": 68_000_000_000, "clock": 1.7}
    assert made.device is not None
    assert made.device.reached is not None
    assert made.device.reached.products.float16 == pytest.approx(products.float16)
    made_like = dataclasses.replace(made.device, reached=reached)
    assert made_like == dataclasses.replace(like, **expected, peak=peak, reached=reached)
    assert made.memory == 68_000_000_000
    assert made.inside == find_cluster("h100").inside
    copy = tmp_path / "copy.toml"
    copy.write_text(cluster_toml(made))
    assert load_cluster(copy) == made
    copy.write_text(cluster_toml(made.at_peaks()))  # of a device that is like none, nobody knows what is reached
    assert load_cluster(copy).device == dataclasses.replace(made.device, reached=None)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("like", "lik", UnknownNameError, "no field named 'device.lik' in .*did you mean 'device.like'"),
        (
            'like = "H100-80GB"',
            'like = "H10"',
            UnknownNameError,
            "no device kind named 'H10' in ",
        ),
        ('like = "H100-80GB"', "", DeviceError, "'device.num_cores' is missing; give a positive whole number"),
        ('"9.0"', "9.0", DeviceError, "'device.capability' is 9.0; give it in quotes, like \"9.0\""),
        ("clock = 1.7", "clock = -1", DeviceError, "'device.clock' is -1; give a positive number"),
        ("float16", "float17", UnknownNameError, "no field named 'device.peak.float17' .* mean 'device.peak.float16'"),
        ("[device.peak]", "peak = 3\n[inside]", DeviceError, r"the table \[device.peak\] with FLOP/s by type \(float64"),
        (
            "[device.peak]",
            "reached = 3\n[device.peak]",
            DeviceError,
            r"'device.reached' is 3; give a table \[device.reached\]",
        ),
        (
            "[device.peak]",
            "[device.reached]\nlaunch = -1\n[device.peak]",
            DeviceError,
            "'device.reached.launch' is -1; give a",
        ),
        (
            "[device.peak]",
            "[device.reached]\nhalf = 1\n[device.peak]",
            UnknownNameError,
            "no field named 'device.reached.half'",
        ),
        (
            WITH_DEVICE[WITH_DEVICE.index("[device]") :],
            "device = 3",
            DeviceError,
            "'device' is 3; give a kind's name or",
        ),
        ('"9.0"', '"8.9"', DeviceError, r"the table \[inside\] .* is missing"),  # nothing is usual for it
    ],
)
def test_mistakes_in_a_device_are_named(
    tmp_path: Path, old: str, new: str, error: type[JscalerError], message: str
) -> None:
    assert old in WITH_DEVICE
    path = tmp_path / "bad.toml"
    path.write_text(WITH_DEVICE.replace(old, new, 1))
    with pytest.raises(error, match=message) as raised:
        load_cluster(path)
    assert str(path) in str(raised.value)


def test_the_documented_files_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    lab, own, unlike = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "file.toml"
    path.write_text(lab, encoding="utf-8")
    assert (load_cluster(path).name, load_cluster(path).device) == ("lab", DEVICE_KINDS["A100-80GB"])
    path.write_text(own, encoding="utf-8")
    made = load_cluster(path)
    assert made.device is not None
    assert (made.device.num_cores, made.device.peak.float16, made.device.l2_cache) == (124, 360e12, 40 << 20)
    assert made.between == find_cluster("4x4xA100-80GB").between
    path.write_text(unlike, encoding="utf-8")
    made = load_cluster(path)
    assert [str(made.of([device]).device) for device in (0, 7, 8, 15)] == ["V100-32GB"] * 2 + ["A100-80GB"] * 2
    assert made.num_devices == 16
