"""Files that users write or edit by hand, and what stands for them: clusters, plans, schedules; each mistake told."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters.test_cluster_file import GOOD
from test_bad_inputs import BATCH, PARAMS, lowered, pattern, step

import jscaler
from jscaler import Table, plans
from jscaler.clusters import Cluster, Link, find_cluster
from jscaler.errors import DeviceError, JscalerError, OrderError, PlanError, PlanFileError, PlanFitError, UnknownNameError

# -- clusters: what is edited in this file, and to what

LAB = f"""{GOOD.lstrip()}\
[device]
name = "mine"
like = "H100-80GB"
capability = "9.0"
clock = 1.7
[device.peak]
float16 = 9e14
"""
KIND = LAB[LAB.index("[device]") :]
CLUSTER_FILES: dict[str, tuple[tuple[str, str] | bytes, type[JscalerError], str]] = {
    "nothing": (b"", DeviceError, "'hosts' is missing; give a positive whole number"),
    "json": (b'{"hosts": 4}', DeviceError, "cannot read the cluster file …Invalid statement (at line 1…bench-comm --out"),
    "yaml": (b"hosts: 4\n", DeviceError, "Expected '=' after a key in a key/value pair (at line 1, column 6)"),
    "UTF-16": (LAB.encode("utf-16"), DeviceError, "'utf-8' codec can't decode byte 0xff in position 0"),
    "Latin-1": (LAB.replace("lab", "labör").encode("latin-1"), DeviceError, "'utf-8' codec can't decode byte 0xf6"),
    "a byte order mark": (b"\xef\xbb\xbf" + LAB.encode(), DeviceError, "cannot read the cluster file …at line 1, column 1"),
    "two numbers of hosts": (("hosts = 4", "hosts = 4\nhosts = 5"), DeviceError, "Cannot overwrite a value (at line 3"),
    "two links of one name": (("[between]", "[inside]"), DeviceError, "Cannot declare ('inside',) twice (at line 8"),
    "a list of links": (("[inside]", "[[inside]]"), DeviceError, "the table [inside] with latency (seconds) and bandwidth"),
    "a link in a link": (("[between]", "[inside.nvlink]"), UnknownNameError, "no field named 'inside.nvlink' in "),
    "a count of all devices": (("hosts = 4", "devices = 32\nhosts = 4"), UnknownNameError, "no field named 'devices' in "),
    "too many devices": (("hosts = 4", "hosts = 1000000"), DeviceError, "has 8000000 devices; give at most 1048576"),
    "hosts in a list": (("hosts = 4", "hosts = [4]"), DeviceError, "'hosts' is [4]; give a positive whole number"),
    "hosts as a date": (("hosts = 4", "hosts = 2024-01-01"), DeviceError, "'hosts' is datetime.date(2024, 1, 1)"),
    "GB/s": (("= 100_000_000", "= 25"), DeviceError, "'between.bandwidth' is 25 bytes per second; give 1e+06"),
    "microseconds": (("latency = 5e-6", "latency = 5"), DeviceError, "'between.latency' is 5 seconds; give 0 to 1, in sec"),
    "GB": (("34_089_730_048", "32"), DeviceError, "'memory' is 32 bytes; give 1e+06 to 1e+15, in bytes"),
    "memory in words": (("34_089_730_048", '"32GB"'), DeviceError, "'memory' is '32GB'; give a positive whole number"),
    "memory as a float": (("34_089_730_048", "32e9"), DeviceError, "'memory' is 32000000000.0; give a positive whole"),
    "names": (('"lab"', '["lab", "b"]'), DeviceError, "'name' is ['lab', 'b']; give text, in quotes"),
    "MHz": (("clock = 1.7", "clock = 1700"), DeviceError, "'device.clock' is 1700 GHz; give 0.01 to 100, in GHz"),
    "TFLOP/s": (("9e14", "900"), DeviceError, "'device.peak.float16' is 900 FLOP/s; give 1e+06 to 1e+20, in FLOP/s"),
    "TFLOP/s in words": (("9e14", '"900 TFLOPS"'), DeviceError, "'device.peak.float16' is '900 TFLOPS'; give a positive"),
    "a name of a number": (('name = "mine"', "name = 5"), DeviceError, "'device.name' is 5; give text, in quotes"),
    "like a number": (('like = "H100-80GB"', "like = 5"), DeviceError, "'device.like' is 5; give text, in quotes"),
    "sm_90": (('"9.0"', '"sm_90"'), DeviceError, "'device.capability' is 'sm_90'; give it in quotes, like \"9.0\""),
    "a table of one's own": ((KIND, "[x]\ny = 1"), UnknownNameError, "no field named 'x' in …known: name, hosts"),
    "a kind to come": (f'device = "B200"\n{LAB[: -len(KIND)]}'.encode(), UnknownNameError, "no device kind named 'B200' i"),
    "two kinds": (f'device = ["A100", "H100"]\n{LAB[: -len(KIND)]}'.encode(), DeviceError, "'device' is ['A100', 'H100'];"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_cluster_files(name: str, tmp_path: Path) -> None:
    change, kind, sentence = CLUSTER_FILES[name]
    if isinstance(change, tuple):
        assert LAB.count(change[0]) == 1
        change = LAB.replace(*change).encode()
    (tmp_path / "lab.toml").write_bytes(change)
    with pytest.raises(kind, match=pattern(sentence)) as raised:
        find_cluster(str(tmp_path / "lab.toml"))
    assert "lab" in str(raised.value)


OK = Link(1e-6, 1e9)
CLUSTERS: dict[str, tuple[Callable[[], Any], type[JscalerError], str]] = {
    "a negative bandwidth": (lambda: Link(1e-6, -1e9), DeviceError, "positive numbers, not 1e-06 and -1000000000.0"),
    "a latency that is none": (lambda: Link(float("nan"), 1e9), DeviceError, "positive numbers, not nan and 1000000000.0"),
    "a bandwidth in words": (lambda: Link(1e-6, "1e9"), DeviceError, "positive numbers, not 1e-"),  # type: ignore[arg-type]
    "half a host": (lambda: Cluster("lab", 1.5, 8, OK, OK), DeviceError, "'lab' has 1.5 hosts o"),  # type: ignore[arg-type]
    "no link": (lambda: Cluster("lab", 1, 8, None, OK), DeviceError, "has two Links and a Devic"),  # type: ignore[arg-type]
    "memory in words": (lambda: Cluster("lab", 1, 8, OK, OK, "9"), DeviceError, "has devices of"),  # type: ignore[arg-type]
    "a kind's name": (lambda: Cluster("lab", 1, 8, OK, OK, 0, "A100"), DeviceError, "or None, n"),  # type: ignore[arg-type]
    "a number": (lambda: find_cluster(8), DeviceError, "a cluster is a Cluster, a built-in one'"),  # type: ignore[arg-type]
    "another ending": (lambda: find_cluster("lab.TOML"), UnknownNameError, "no cluster named 'lab.TOML' (or describe one"),
    "three levels": (lambda: find_cluster("2x2x8xH100-80GB"), UnknownNameError, "no cluster named '2x2x8xH100-80GB'"),
    "one of several kinds": (lambda: find_cluster("8xV100"), UnknownNameError, "no device kind named 'V100' in '8xV100'"),
    "too small a one": (
        lambda: lowered("data_parallel", cluster="2xH100-80GB"),
        DeviceError,
        "the cluster '2xH100-80GB' has 2 devices and the plan is for 8; give a cluster of as many, or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(name: str) -> None:
    make, kind, sentence = CLUSTERS[name]
    with pytest.raises(kind, match=pattern(sentence)):
        make()


# -- plan files: what is edited in a saved plan, as its text or as its data; it is then loaded and lowered

Data = dict[str, Any]


@functools.cache
def saved() -> str:
    return lowered("megatron(2, 4)").plan.plan.to_json()


def edit(change: Callable[[Data, Data, Data], Any]) -> Callable[[str], str]:
    """``change(data, first op_trans, first op_assign)``, in a file without its digest."""

    def edited(text: str) -> str:
        data = json.loads(text)
        del data["digest"]
        change(data, *data["decisions"][:2])
        return json.dumps(data)

    return edited


def added(**decision: Any) -> Callable[[str], str]:
    return edit(lambda data, *_: data["decisions"].append(decision))


FITS = "plan 'megatron' does not fit this graph; the first difference: "
PLAN_FILES: dict[str, tuple[Callable[[str], str | bytes], type[JscalerError], str]] = {
    "a third": (lambda text: text[: len(text) // 3], PlanFileError, "it is no JSON: "),
    "two thirds": (lambda text: text[: 2 * len(text) // 3], PlanFileError, "it is no JSON: Unterminated string"),
    "without its end": (lambda text: text[:-3], PlanFileError, "it is no JSON: Expecting ',' delimiter: line 36"),
    "a byte order mark": (lambda text: b"\xef\xbb\xbf" + text.encode(), PlanFileError, "it is no JSON: Unexpected UTF-8 B"),
    "UTF-16": (lambda text: text.encode("utf-16"), PlanFileError, "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "a comment": (lambda text: "// mine\n" + text, PlanFileError, "it is no JSON: Expecting value: line 1 column 1"),
    "a comma too many": (lambda text: text.replace("]\n}", "],\n}"), PlanFileError, "it is no JSON: "),
    "two plans": (lambda text: text + text, PlanFileError, "it is no JSON: Extra data: line 38 column 1"),
    "decisions twice": (
        lambda text: text.replace('"decisions"', '"decisions": [],\n "decisions"'),
        PlanFileError,
        "it says 'decisions' 2 times in one object; leave one",
    ),
    "a factor twice": (
        lambda text: text.replace('"factor": "c"', '"factor": "a", "factor": "c"'),
        PlanFileError,
        "it says 'factor' 2 times in one object",
    ),
    "an op twice": (edit(lambda d, t, a: d["ops"].append(d["ops"][0])), PlanFileError, "'ops' has 'loss/dot' twice"),
    "an op renamed": (edit(lambda d, t, a: t.update(op="loss/dt")), PlanFitError, FITS + "op 'loss/dt' is not in the grap"),
    "another op's factor": (
        edit(lambda d, t, a: t["axes"][0].update(factor="d")),
        PlanFitError,
        "no factor named 'd' in op 'loss/dot' (a b, b c -> a c); known: a, b, c",
    ),
    "three parts": (
        edit(lambda d, t, a: t["axes"][0].update(parts=3)),
        PlanFitError,
        "'loss/dot' cannot split factor 'a' of size 16 into 3 parts; legal: 1, 2, 4, 8, 16",
    ),
    "sizes beside parts": (
        edit(lambda d, t, a: t["axes"][0].update(sizes=[8, 4, 4])),
        PlanFitError,
        "'loss/dot' is split into 2 parts of the sizes [8, 4, 4]",
    ),
    "an axis twice": (edit(lambda d, t, a: t["axes"].append(t["axes"][0])), PlanFitError, "are none of its grid [2, 4, 2]"),
    "a ninth device": (
        edit(lambda d, t, a: d["places"][0].__setitem__(0, 8)),
        PlanFitError,
        "'loss/dot' is assigned to devices '8' of 8",
    ),
    "a device too few": (edit(lambda d, t, a: d["places"][0].pop()), PlanFitError, "8 cells of 'loss/dot' are assigned to"),
    "a device in words": (
        edit(lambda d, t, a: d["places"][0].__setitem__(0, "d0")),
        PlanFileError,
        "places[0][0] is 'd0', not a device's number, or '<number>@host'",
    ),
    "a host's memory": (
        edit(lambda d, t, a: d["places"][0].__setitem__(0, "0@host")),
        PlanError,
        "'loss/dot' is assigned to 'd0@host': ops cannot run in host memory",
    ),
    "cells that are none": (
        edit(lambda d, t, a: a["index"][0].__setitem__(1, 99)),
        PlanFitError,
        "the cells [[0, 99], [0, 4]] of 'loss/dot' are none of its grid [2, 4]",
    ),
    "any order in words": (edit(lambda d, t, a: a.update(any_order="yes")), PlanFileError, "any_order is 'yes', not true"),
    "assigned twice": (edit(lambda d, t, a: d["decisions"].append(a)), PlanError, "cell [0, 0] of 'loss/dot' is assigned"),
    "never assigned": (edit(lambda d, t, a: d["decisions"].remove(a)), PlanError, "8 of them have no device"),
    "never split": (edit(lambda d, t, a: d["decisions"].remove(t)), PlanFitError, "is assigned to devices before it is sp"),
    "a circle": (
        added(kind="op_order", before="loss/dot.1", after="loss/dot"),
        OrderError,
        "the order is cyclic: loss/dot -> loss/dot.1; loss/dot.1 < loss/dot",
    ),
    "fewer devices": (edit(lambda d, t, a: d.update(devices=4)), DeviceError, "the plan 'megatron' is for 4 devices, and"),
    "options in a list": (edit(lambda d, t, a: d.update(told=[1])), PlanFileError, "'told' is '[1]'; it must be options o"),
    "no rules": (edit(lambda d, t, a: d.pop("rules")), PlanFileError, "'rules' is missing; it must be a list"),
    "another rule": (
        edit(lambda d, t, a: d["rules"].__setitem__(0, "a b")),
        PlanFitError,
        "the rule of op 'loss/dot' is 'a b, b c -> a c; a 16, b 8 reduction, c 16' here, and was 'a b'",
    ),
    "a schedule that is none": (added(kind="schedule", table="1f1c"), PlanError, "'1f1c' is no cell of a table"),
    "another leaf": (
        added(kind="shard", leaf="params/c", dim=0, parts=8, devices=0),
        PlanFitError,
        "no input named 'params/c'; did you mean 'params/b'?",
    ),
    "another dim": (
        added(kind="shard", leaf="params/a", dim=7, parts=8, devices=0),
        PlanFitError,
        "'params/a' of shape (8, 16) has no dim 7",
    ),
    "another loop": (added(kind="ranges", loop="layers", sizes=[1, 2]), PlanFitError, "no loop over layers named 'layers'"),
    "sums of whole numbers": (added(kind="accumulation", dtype="int3"), PlanFitError, "a floating dtype like 'bfloat16',"),
    "code": (
        edit(lambda d, t, a: t["axes"][0].update(algorithm={"name": "os:system", "fields": {}})),
        PlanFileError,
        "axes[0].algorithm: 'os:system' is no algorithm: not a dataclass with an expand method",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAN_FILES)
def test_plan_files_edited_by_hand(name: str, tmp_path: Path) -> None:
    change, kind, sentence = PLAN_FILES[name]
    text = change(saved())
    (tmp_path / "plan.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(kind, match=pattern(sentence)):
        lowered(str(tmp_path / "plan.json"))


def test_plans_of_another_step() -> None:
    plan = jscaler.Plan.from_json(saved())
    for fun, told in (
        (lambda params, batch: batch @ params["a"], "op 'loss/dot.1' is not in the graph…5 of the plan's ops are missing"),
        (lambda p, batch: step(p, batch), "op 'update/params/a/sub' is not in the graph; did you mean 'update/p/a/sub'?"),
    ):
        with pytest.raises(PlanFitError, match=pattern(told)):
            jscaler.parallelize(plan)(fun).lower(PARAMS, BATCH)


# -- schedules, for two stages and four micro-batches

FIRST, SECOND = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
TABLES: dict[str, tuple[Any, type[JscalerError], str]] = {
    "a block missing": (f"{FIRST[:-4]}\n{SECOND}", PlanError, "row 0 of the table, that of devices [0], lacks '0B3'"),
    "a block twice": (f"{FIRST} 0B3\n{SECOND}", PlanError, "row 0 of the table, that of devices [0], has twice '0B3'"),
    "another letter": (f"{FIRST[:-1]}3 0X3\n{SECOND}", PlanError, "'0X3' is no cell of a table: a cell is stage, kind (F,"),
    "rows in another order": (f"{SECOND}\n{FIRST}", PlanError, "the rows of the table begin with the stages [1, 0]"),
    "one row": (f"{FIRST} {FIRST}", PlanError, "the table has 1 rows and the stages [0]; there are 2 groups"),
    "three rows": (f"{FIRST}\n{SECOND}\n2F0 2B0", PlanError, "the table has 3 rows and the stages [0, 1, 2]; there are 2"),
    "each waits": (f"{FIRST}\n1B0 1F0{SECOND[7:]}", OrderError, "row 1 of the table has 1B0 in front of 1F0, for w"),
    "a tenth micro-batch": (f"{FIRST} 0F9\n{SECOND}", PlanError, "has '0F9, which does not run anywhere'; it runs '0F for"),
    "half a backward": (f"{FIRST[:-3]}0I3\n{SECOND}", PlanError, "row 0 of the table, that of devices [0], lacks '0W3'"),
    "open brackets": (f"(0F0;0B0 {FIRST}\n{SECOND}", PlanError, "'(0F0;0B0' is no cell of a table"),
    "a number": (5, PlanError, "a schedule is a name, a Table, its text, or a file that holds one, not 5"),
    "rows": ([FIRST, SECOND], PlanError, "a schedule is a name, a Table, its text, or a file that holds one, not ['0F0 0F"),
    "three micro-batches": ("chimera", PlanError, "there is no schedule 'chimera' for 2 groups and 3 micro-batches"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    table, kind, sentence = TABLES[name]
    with pytest.raises(kind, match=pattern(sentence)):
        lowered(plans.pipeline(2, 3 if table == "chimera" else 4, table), devices=2)


def test_tables_of_text() -> None:
    with pytest.raises(PlanError, match=pattern("the rows of a Table are tuples of cells, not (('0F0',),); Table.parse")):
        Table((("0F0",),))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=pattern("the text of a table is rows of cells, such as '0F0 0B0', not 5")):
        Table.parse(5)  # type: ignore[arg-type]
