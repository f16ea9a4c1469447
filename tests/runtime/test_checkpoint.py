"""Orbax saves and restores a training state, also into another plan on other devices."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from of_the_day import of_the_day

import jscaler
from jscaler.runtime import checkpoint
from tests.runtime.test_training_state import (
    KeyedState,
    Net,
    assert_equal,
    columns_then_rows,
    make_nnx,
    make_state,
    net_batch,
    net_step,
    nnx_step,
)

ARGUMENTS = (make_state, Net(), jax.random.key(3), 1e-2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KeyedState, Any]:
    """A state after one step, saved; and the loss of the next step."""
    step = jscaler.parallelize(columns_then_rows, devices=4)(net_step)
    state, _ = step(step.init(*ARGUMENTS, batch=net_batch()), net_batch())
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path, state, step(state, net_batch())[1]


@pytest.mark.parametrize(
    ("plan", "devices"),
    of_the_day([(columns_then_rows, 4), (columns_then_rows, 8), ("data_parallel", 2), ("single", 1)], 2),
)
def test_restore_into_a_plan(saved: Any, plan: Any, devices: int) -> None:
    path, state, loss = saved
    step = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(net_step)
    target = step.abstract_state(*ARGUMENTS, batch=net_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, target)
    assert_equal(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
    after, next_loss = step(restored, net_batch())
    np.testing.assert_allclose(next_loss, loss, rtol=1e-5)
    assert after.step == 2
    assert len(step._lowered) == 1  # it was planned for the state that was restored


@pytest.mark.smoke
def test_restore_nnx_objects(tmp_path: Path) -> None:
    step = jscaler.parallelize(columns_then_rows, devices=4)(nnx_step)
    model, optimizer = step.init(make_nnx, 0, batch=net_batch())
    step(model, optimizer, net_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state((model, optimizer)))
    loss = step(model, optimizer, net_batch())

    other = jscaler.parallelize("data_parallel", devices=2)(nnx_step)
    again, its = other.abstract_state(make_nnx, 0, batch=net_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", nnx.state((again, its)))
    nnx.update((again, its), restored)
    np.testing.assert_allclose(other(again, its, net_batch()), loss, rtol=1e-5)
    np.testing.assert_allclose(again.up.kernel[...], model.up.kernel[...], atol=1e-5)
    assert len(other._lowered) == 1


def test_a_state_that_orbax_would_leave_out_is_refused(tmp_path: Path) -> None:
    """Orbax skips a step that is not beyond the latest one, and says so by what it returns."""
    folder, state = tmp_path / "run", {"w": jax.numpy.ones(3)}
    checkpoint.check_unused(folder)
    assert checkpoint.found_step(folder) is None
    checkpoint.save(folder, 5, state)
    checkpoint.save(folder, 7, {"w": 2 * state["w"]})
    assert checkpoint.latest_step(folder) == 7
    for step in (3, 7):
        with pytest.raises(jscaler.DataError, match=rf"after {step} steps is not saved: .* one after 7"):
            checkpoint.save(folder, step, state)
    with pytest.raises(jscaler.DataError, match=r"a checkpoint after 7 steps in .*--resume, or give another folder"):
        checkpoint.check_unused(folder)
    target = {"w": jax.ShapeDtypeStruct((3,), np.float32, sharding=state["w"].sharding)}
    np.testing.assert_array_equal(checkpoint.restore(folder, 7, target)["w"], [2.0, 2.0, 2.0])


@pytest.mark.one_day_in(2)
def test_what_its_storage_does_is_no_damage_of_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not put aside: a moment later it can be read."""
    kinds: list[tuple[Exception, bool]] = [
        (FileNotFoundError(2, "No such file"), True),
        (ValueError("OUT_OF_RANGE: 12 bytes were wanted"), True),
        (OSError(116, "Stale file handle"), False),
        (PermissionError(13, "Permission denied"), False),
        (ValueError("UNAVAILABLE: try again"), False),
        (ValueError("RESOURCE_EXHAUSTED: Too many open files"), False),
        (MemoryError(), False),
    ]
    assert [checkpoint._is_damage(error) for error, _ in kinds] == [damage for _, damage in kinds]
    state = {"w": jax.numpy.ones(3)}
    target = {"w": jax.ShapeDtypeStruct((3,), np.float32, sharding=state["w"].sharding)}
    checkpoint.save(tmp_path, 5, state)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "restore", refuse)
        with pytest.raises(jscaler.DataError, match=r"Stale file handle; it stays as it is"):
            checkpoint.restore_latest(tmp_path, target)
    assert checkpoint.restore_latest(tmp_path, target)[0] == 5

    def full(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")  # no device of ours

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(jscaler.OutputError, match=r"cannot write the checkpoint .*No space left on device"):
            checkpoint.save(tmp_path, 6, state)


def test_a_url_is_no_folder() -> None:
    with pytest.raises(jscaler.OutputError, match=r"it is a URL \(gs\), and a folder is wanted; mount it"):
        checkpoint.save(Path("gs://bucket/run"), 1, {"w": jax.numpy.ones(3)})


@pytest.mark.one_day_in(2)
def test_without_orbax_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['orbax'] = sys.modules['orbax.checkpoint'] = None; import jscaler.runtime.checkpoint"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "jscaler[checkpoint]"' in run.stderr
