"""Real text as batches: the same for every process, clear errors where there is none."""

from pathlib import Path

import numpy as np
import pytest

from jscaler.errors import DataError
from models.gpt import GPTConfig
from models.recipes import RECIPES
from models.text import batch_at, held_out, load_bytes


def test_python_s_documentation_is_the_default() -> None:
    data = load_bytes()
    assert len(data) > 300_000
    assert b"assert" in data.tobytes()


def test_a_folder_is_its_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert load_bytes(tmp_path).tobytes() == b"first\nsecond"


def test_labels_are_the_next_bytes_and_batches_depend_on_the_step_alone() -> None:
    data = np.arange(100, dtype=np.uint8)
    batch = batch_at(data, 3, 4, 10)
    np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["tokens"], batch_at(data, 3, 4, 10)["tokens"])
    assert (batch["tokens"] != batch_at(data, 4, 4, 10)["tokens"]).any()


def test_missing_empty_and_short_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training data at"):
        load_bytes(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"holds no text \(0 files, 0 bytes\)"):
        load_bytes(tmp_path)
    with pytest.raises(DataError, match="the data has 5 bytes; one sequence needs 11"):
        batch_at(np.zeros(5, np.uint8), 0, 1, 10)


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    drawn, unread = RECIPES["gpt"].data(GPTConfig(8, 1, 1, sequence=4), path, True)
    read = np.unique([drawn(step, 8, 0)["labels"] for step in range(50)])
    held = np.unique([unread(step, 8, 0)["labels"] for step in range(50)])
    assert read.max() < 95 <= held.min()
    everything = RECIPES["gpt"].data(GPTConfig(8, 1, 1, sequence=4), path, False)[0]
    assert np.unique([everything(step, 8, 0)["labels"] for step in range(50)]).max() > 95
    with pytest.raises(DataError, match="has 100 bytes; a sequence to train on and one to evaluate need 102"):
        held_out(load_bytes(path), 50)
