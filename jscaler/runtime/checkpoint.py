"""Checkpoints of ``jscaler train``: a folder that Orbax writes, one state per number of steps taken."""

from pathlib import Path
from typing import Any

from jscaler.errors import DataError, JscalerError

try:
    import orbax.checkpoint as ocp
except ImportError:
    raise JscalerError('checkpoints need Orbax, which is not installed: pip install "jscaler[checkpoint]"') from None


def save(folder: Path, step: int, state: Any) -> None:
    """Save ``state``, as it is after ``step`` steps.

    Raises:
        DataError: there is a state of as many steps, or of more.
    """
    with ocp.CheckpointManager(folder.absolute()) as manager:
        saved = manager.save(step, args=ocp.args.StandardSave(state))
    if not saved:  # Orbax says so, and no more
        raise DataError(f"the state after {step} steps is not saved: {folder} has one after {found_step(folder)}")


def found_step(folder: Path) -> int | None:
    """The number of steps taken by the latest state in ``folder``, where there is one."""
    if not folder.is_dir():
        return None
    with ocp.CheckpointManager(folder.absolute()) as manager:
        return manager.latest_step()


def check_unused(folder: Path) -> None:
    """Raises DataError where ``folder`` holds the state of another run, beside which that of a new one would be lost."""
    if (step := found_step(folder)) is not None:
        raise DataError(
            f"there is a checkpoint after {step} steps in {folder}: go on from it with --resume, or give another folder"
        )


def latest_step(folder: Path) -> int:
    """The number of steps taken by the latest state in ``folder``.

    Raises:
        DataError: there is none.
    """
    if (step := found_step(folder)) is not None:
        return step
    raise DataError(f"there is no checkpoint in {folder}: train with --checkpoint {folder} first, without --resume")


def restore(folder: Path, step: int, target: Any) -> Any:
    """The state after ``step`` steps, laid out as ``target`` says: a tree of structs with shardings."""
    with ocp.CheckpointManager(folder.absolute()) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))
