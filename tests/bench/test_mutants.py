"""Every fault that `bench.mutants` plants still fits the tree; none is run here."""

import ast
from pathlib import Path

import pytest

from bench.mutants import ROOT, Copy, Mutant, Sound, copied, measured, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.name}-{m.what}")
def test_fits_the_tree(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.planted(text)
    assert "\n" not in mutant.old + mutant.new
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))


def test_faults_in_every_package() -> None:
    packages = {"ir", "lax_primitives", "rules", "capture", "primitives", "schedule", "clusters", "materialize", "lower"}
    packages |= {"flat_passes", "xla_model", "estimate", "plans", "verification", "report", "runtime", "tables"}
    assert len(MUTANTS) >= 44
    assert {m.package for m in MUTANTS} == packages
    assert sum(m.quick for m in MUTANTS) == 2


def test_a_text_that_does_not_fit_is_named() -> None:
    mutant = Mutant("jscaler/ir/mask.py", "it does not fit", "no such text", "")
    with pytest.raises(ValueError, match=r"jscaler/ir/mask\.py: 'no such text' stands there 0 times, not once \(it does"):
        mutant.planted("text")


def _project(folder: Path, test: str) -> Copy:
    for name, text in {"jscaler/ir/one.py": "ONE = 1\n", "tests/ir/test_one.py": test, "tests/ir/test_a.py": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return Copy(folder, workers=0, limit=60)


FAULT = Mutant("jscaler/ir/one.py", "one is two", "ONE = 1", "ONE = 2")


@pytest.mark.one_day_in(3)
def test_a_planted_fault_is_noticed_and_goes_again(tmp_path: Path) -> None:
    copy = _project(tmp_path, "from jscaler.ir.one import ONE\n\n\ndef test_one():\n    assert ONE == 1\n")
    stages = copy.stages(FAULT, everything=True)
    assert stages == {"file": ["tests/ir/test_one.py"], "package": ["tests/ir"], "all": ["tests"]}
    assert copy.run(stages["file"]).failed == ""
    assert copy.with_fault(FAULT, FAULT.file, stages["file"]).failed == "tests/ir/test_one.py::test_one"
    assert (tmp_path / FAULT.file).read_text(encoding="utf-8") == "ONE = 1\n"


@pytest.mark.one_day_in(3)
def test_a_test_that_fails_anyhow_is_no_catch(tmp_path: Path) -> None:
    copy = _project(tmp_path, "def test_one():\n    assert False\n")
    row = {"caught_by": "", "test": "", "seconds": 0.0, "old": "", "ran": []}
    with pytest.raises(RuntimeError, match=r"tests/ir/test_one\.py::test_one fails before anything is planted"):
        measured(FAULT, row, copy, None, False, Sound())


@pytest.mark.one_day_in(3)
def test_tests_that_hang_are_a_catch(tmp_path: Path) -> None:
    copy = _project(tmp_path, "import time\n\n\ndef test_one():\n    time.sleep(60)\n")
    assert Copy(copy.root, 0, limit=3).run(["tests"]).failed == "hung: no end in 3 s"


def test_a_fault_is_found_in_another_file_of_an_earlier_tree(tmp_path: Path) -> None:
    copy = _project(tmp_path, "")
    moved = Mutant("jscaler/ir/other.py", "one is two", "ONE = 1", "ONE = 2")
    assert (copy.place(moved), copy.place(FAULT)) == ("jscaler/ir/one.py", "jscaler/ir/one.py")
    assert copy.place(Mutant("jscaler/ir/one.py", "", "THREE", "")) == ""


def test_the_copy_has_all_but_the_test_of_the_faults(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    assert (folder / "jscaler/ir/mask.py").exists()
    assert (folder / "tests/conftest.py").exists()
    assert not (folder / "tests/bench/test_mutants.py").exists()
