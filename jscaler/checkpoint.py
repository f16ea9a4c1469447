"""Checkpoints of ``jscaler train``: a folder that Orbax writes, one state per number of steps taken."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jscaler.errors import DataError


def save(folder: Path, step: int, state: Any) -> None:
    """Save ``state``, as it is after ``step`` steps."""
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def latest_step(folder: Path) -> int:
    """The number of steps taken by the latest state in ``folder``.

    Raises:
        DataError: there is none.
    """
    if folder.is_dir():
        with ocp.CheckpointManager(folder.absolute()) as manager:
            step = manager.latest_step()
        if step is not None:
            return step
    raise DataError(f"there is no checkpoint in {folder}: train with --checkpoint {folder} first, without --resume")


def restore(folder: Path, step: int, target: Any) -> Any:
    """The state after ``step`` steps, laid out as ``target`` says: a tree of structs with shardings."""
    with ocp.CheckpointManager(folder.absolute()) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))
