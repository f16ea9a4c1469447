"""Tables as text and as the CSV of `torch.distributed.pipelining`; what of it is left out, and what cannot be read."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from jscaler import PlanError, UnknownNameError
from jscaler.errors import PlanWarning
from jscaler.tables import SCHEDULES, Table, TableCell, find_schedule, read_table, write_table
from jscaler.tables.files import csv_text, parse_csv
from jscaler.tables.table import Overlap, parse_entry

# as `_dump_csv` writes the actions of ranks, with and without what they send and how they hold parameters
COMPUTE = """\
0F0,0F1,0F2,,3F0,3I0,3W0,(0F3;3B1)OVERLAP_F_B,0B0
,1F0,2F0,2B0,,1B0
"""
LOWERED = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_actions_of_ranks() -> None:
    """A field that is empty is a step in which a rank waits, and of no interest: order is all that a table says."""
    table = parse_csv(COMPUTE)
    assert str(table) == "0F0 0F1 0F2 3F0 3I0 3W0 (0F3;3B1) 0B0\n1F0 2F0 2B0 1B0"
    assert table.rows[0][6] == Overlap((TableCell(0, "F", 3), TableCell(3, "B", 1)))
    assert parse_csv(COMPUTE.replace(",,", ",None,").replace("\n,", "\nNone,")) == table
    assert parse_csv(COMPUTE.replace(",", " , ")) == table
    assert parse_csv(COMPUTE.replace("\n", "\r\n")) == table
    assert parse_csv(COMPUTE + "\n\n") == table


def test_what_is_written_is_what_torch_writes() -> None:
    assert csv_text(Table.parse("0F0 (0F1;0B0) 0I1 0W1\n1F0 1B0")) == "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n1F0,1B0\n"


def test_what_is_sent_and_held_is_left_out_with_one_warning() -> None:
    with pytest.warns(PlanWarning) as caught:
        table = parse_csv(LOWERED, "lowered.csv")
    assert str(table) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert [str(one.message) for one in caught] == [
        "lowered.csv: actions of these kinds are left out, as the plan says what is sent and how parameters lie: "
        "'RECV_B (2)', 'RECV_F (2)', 'REDUCE_GRAD (2)', 'RESHARD (2)', 'SEND_B (2)', 'SEND_F (2)', 'UNSHARD (2)'"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0F1\n1F0,1G1\n", "mine.csv, line 2, field 2: '1G1' is no cell of a table"),
        ("0F0,0SEND_X1\n", "mine.csv, line 1, field 2: '0SEND_X1' is no cell"),
        ("0F0,,(0F1;0X0)OVERLAP_F_B\n", r"mine.csv, line 1, field 3: '0X0' is no cell"),
        ("0F0,\n\n0F1,F2\n", "mine.csv, line 3, field 2: 'F2' is no cell"),
        ("0F0,0f1\n", "mine.csv, line 1, field 2: '0f1' is no cell"),
    ],
)
def test_a_field_that_cannot_be_read_is_named(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=told.replace("(", r"\(")):
        parse_csv(text, "mine.csv")
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=told):
        read_table(path)


@pytest.mark.parametrize("text", ["0X1", "F0", "0F", "-1F0", "0F0.5", "(0F0", "(0F0;)", "()", "0F0OVERLAP_F_B"])
def test_a_cell_that_cannot_be_read(text: str) -> None:
    with pytest.raises(
        PlanError, match=r"is no cell of a table: a cell is stage, kind \(F, R, B, I, W\) and micro-batch, as in 0F3"
    ):
        parse_entry(text)
    with pytest.raises(PlanError, match="is no cell of a table"):
        Table.parse(f"0F0 0B0\n{text}")


@pytest.mark.parametrize("ending", ["csv", "txt"])
def test_files_are_read_as_they_were_written(ending: str, tmp_path: Path) -> None:
    for name in ("1f1b", "zb_v", "dualpipe_v", "interlaced"):
        table = SCHEDULES[name].table(2, 4)
        path = tmp_path / f"{name}.{ending}"
        write_table(table, path)
        assert ("," in path.read_text()) == (ending == "csv")
        assert read_table(path) == read_table(str(path)) == find_schedule(str(path)) == find_schedule(path) == table


def test_what_a_schedule_may_be_given_as(tmp_path: Path) -> None:
    """A name, a table, its text or its file, whatever that is called."""
    table = SCHEDULES["zb_h1"].table(2, 3)
    assert find_schedule("zb_h1") is SCHEDULES["zb_h1"]
    assert find_schedule(SCHEDULES["zb_h1"]) is SCHEDULES["zb_h1"]
    assert find_schedule(table) is table
    assert find_schedule(str(table)) == table
    for name in ("schedule", "my schedule", "my schedule.txt"):
        path = tmp_path / name
        path.write_text(str(table))
        assert find_schedule(str(path)) == table


def test_csv_with_one_action_in_a_line(tmp_path: Path) -> None:
    """No comma says that it is CSV."""
    for name, text in (("one.csv", "0F0"), ("one", "(0F1;0B0)OVERLAP_F_B")):
        path = tmp_path / name
        path.write_text(f"{text}\n")
        assert str(read_table(path)) == text.removesuffix("OVERLAP_F_B")


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As spreadsheets write it."""
    for name, text in (("mine.csv", "0F0,0B0\n1F0,1B0\n"), ("mine.txt", "0F0 0B0\n1F0 1B0\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert str(find_schedule(tmp_path / name)) == "0F0 0B0\n1F0 1B0"


@pytest.mark.parametrize("text", [",,,\n,,,\n", "", "\n\n"])
def test_a_file_without_cells(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"the schedule '.*empty\.csv' has no cells; a cell is stage, kind and micro-batch"):
        find_schedule(path)
    for given in (Table(((), ())), Table(())):
        with pytest.raises(PlanError, match="a table has no cells"):
            find_schedule(given)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(PlanError, match=r"table\.csv' cannot be read: it is no text"):
        read_table(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"the schedule 'nowhere/mine\.csv' cannot be read: No such file or directory"):
        find_schedule("nowhere/mine.csv")
    with pytest.raises(PlanError, match=r"the schedule '/' cannot be read: Is a directory"):
        find_schedule("/")


def test_a_name_that_nothing_has() -> None:
    with pytest.raises(UnknownNameError) as error:
        find_schedule("zb_h3")
    assert "did you mean 'zb_h" in str(error.value)
    assert "or give a table, its text, or a file that holds one" in str(error.value)
    assert all(name in str(error.value) for name in SCHEDULES)
