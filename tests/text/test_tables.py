"""Results for people: nothing is lost between the measurement and the table."""

import io

from rich.console import Console

from jscaler.comparison import Comparison, Side, comparison_table
from jscaler.report.hlo import Totals
from jscaler.text.units import readable_bytes


def test_a_comparison_shows_both_sides_and_their_ratio() -> None:
    ours = Side("mine", "1a", 2.0, 0.010, {"all-reduce": Totals(1, 3, 2048)}, {"temp": 1024}, {}, 1e6)
    sent = {"all-gather": Totals(2, 2, 4096), "all-reduce": Totals(1, 3, 4096)}
    gspmd = Side("mine", "1a", 1.0, 0.020, sent, {"temp": 2048}, {}, 1e6)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(comparison_table(Comparison("mine", 8, 5, ours, gspmd, 1e-7, 2e-7, 3e-7, 4e-7, 0.5)))
    text = console.export_text()
    for shown in ("plan mine on 8 devices", "10.0 ms", "20.0 ms", "0.500", "2.000", "2.0 KiB", "none", "3e-07", "4e-07"):
        assert shown in text


def test_bytes_in_words() -> None:
    assert [readable_bytes(n) for n in (7, 2048, 3 << 20, 5 << 40)] == ["7 B", "2.0 KiB", "3.0 MiB", "5120.0 GiB"]
