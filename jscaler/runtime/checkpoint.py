"""Checkpoints of ``jscaler train``: a folder that Orbax writes, one state per number of steps taken.

A state is whole or not there: Orbax writes beside it and renames at the end. A file of it that is gone or cut short is
noticed when it is read; a bit that has turned in the numbers themselves is not.
"""

import errno
import gc
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jscaler.capture.names import tree_path
from jscaler.errors import CheckpointWarning, DataError, JscalerError, OutputError, ProcessError, warn
from jscaler.report.written import as_path, check_folder, writing
from jscaler.runtime.agreement import any_process
from jscaler.runtime.chunked_array import ChunkedStruct
from jscaler.runtime.fetching import fetched_chunks
from jscaler.runtime.graph_nodes import from_saved_tree, module_paths, to_saved_tree
from jscaler.runtime.out_of_memory import is_out_of_memory
from jscaler.runtime.spreading import brought_home, spread, spread_structs

try:
    import orbax.checkpoint as ocp
except ImportError:
    raise JscalerError('checkpoints need Orbax, which is not installed: pip install "jscaler[checkpoint]"') from None

Folder = str | os.PathLike[str]

SIDES = ("the checkpoint", "the model")
LONGEST_WRITE = 24 * 3600  # seconds that a state may take; Orbax' own 20 minutes end a run whose storage is slow
DAMAGED = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # of an OSError: all else is the storage's, and may pass
PASSING = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|Permission denied|Input/output error|"
    "Stale file handle|Too many open files|timed out",
    re.IGNORECASE,
)
READERS_OWN = (TypeError, AttributeError, AssertionError, NotImplementedError, NameError, ImportError, RecursionError)
MARK = ".seen-"  # and a number: a file for a moment
UNSEEN = 1  # in place of a mark's number: none can be written
FORMAT = 1  # of what a folder holds; grows when an older jscaler could not read it
ITEM = "default"  # the one that a state is to Orbax: a folder in that of its step
OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in what the storage below Orbax says
SETTLES = 0.1  # seconds in which reads end that were under way beside one that has failed
WRITTEN = {"jscaler": {"format": FORMAT, "orbax": ocp.__version__}}  # beside every state


class DamagedError(DataError):
    """A state that cannot be read, for no fault of whoever asks for it."""


class Checkpoints:
    """The states of a run, written into a folder while the run goes on: each is complete, or not there.

    `save` waits until the state is copied from the devices, and until the one before is written; the last is written
    where the ``with`` block ends. What a run that was killed has left half written is taken away.

    Args:
        folder: where they are written, one folder for each.
        every: steps between two; None for no more than who saves asks for.
        keep: how many stay, the latest; None for all.
        about: what is written beside each, as JSON holds it.

    Raises:
        OutputError: when it is entered, saves or ends: what was to be written cannot be; those before stay.
    """

    def __init__(
        self, folder: Folder, every: int | None = None, keep: int | None = None, about: Mapping[str, Any] | None = None
    ):
        self.folder, self.every = as_path("checkpoint", folder), every
        self.latest: int | None = None  # the last that this run has saved
        self._about = WRITTEN["jscaler"] | {"run": dict(about or {})}
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Checkpoints":
        check_folder("checkpoint", self.folder)
        _is_there(self.folder)
        with _saying(self.folder):
            self._clear()
            self._manager = _manager(self.folder, max_to_keep=self._keep)
        self._open.enter_context(_quiet())
        return self

    def _clear(self) -> None:
        """Take away what is half written. Orbax does so in a thread, which may outlive its manager, and meet a new save."""
        if jax.process_index() == 0:
            for half in self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(half)
            for mark in self.folder.glob(f"{MARK}*"):
                mark.unlink(missing_ok=True)
        any_process(False)  # none saves before it is done

    def __exit__(self, *raised: Any) -> None:
        assert self._manager is not None
        manager, self._manager = self._manager, None
        with self._open.pop_all(), _saying(self.folder):
            try:
                manager.wait_until_finished()
            finally:
                manager.close()

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` steps is to be saved."""
        return self.every is not None and step % self.every == 0

    def save(self, step: int, state: Any, batches: int | None = None) -> None:
        """Save ``state``, as it is after ``step`` steps.

        Args:
            batches: how many have been read; as many as steps, if nothing is said.

        Raises:
            DataError: there is a state of as many steps, or of more.
            OutputError: it cannot be written, or the one before could not.
        """
        assert self._manager is not None, "checkpoints are saved within their with block"
        with _saying(self.folder):
            self._manager.wait_until_finished()  # Orbax may leave out what comes while it writes
            more = {"batches": batches, "modules": module_paths(state) or None}
            about = {"jscaler": self._about | {name: one for name, one in more.items() if one is not None}}
            saved = self._manager.save(
                step, args=ocp.args.StandardSave(spread(fetched_chunks(to_saved_tree(state)))), custom_metadata=about
            )
        if not saved:  # Orbax says so, and no more
            last = self._manager.latest_step()
            raise DataError(f"the state after {step} steps is not saved: {self.folder} has one after {last}")
        self.latest = step

    def back(self, target: Any) -> tuple[int, Any] | None:
        """The latest state that is whole, which may be an earlier run's, and the number of its steps; None where none is.

        Args:
            target: how it is to lie, as `restore` takes it.
        """
        assert self._manager is not None, "checkpoints are read within their with block"
        with _saying(self.folder):
            self._manager.wait_until_finished()
        if not steps_in(self.folder):
            return None
        found = restore_latest(self.folder, target)
        self._manager.reload()  # a damaged one was put aside, perhaps
        return found


@contextmanager
def _saying(folder: Path) -> Iterator[None]:
    """What goes wrong within is that a checkpoint cannot be written."""
    try:
        yield
    except JscalerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        _let_go(error)
        refused = _refused(error)
        safe = max((int(one.name) for one in folder.glob("*") if one.name.isdecimal()), default=None)
        told = f"cannot write the checkpoint '{folder}': {refused or _line(error)}"
        told += "" if safe is None else f"; the state after {safe} steps is whole"
        # Orbax hands on what its storage raises, of whatever class
        raise OutputError(f"{told}; make room, or choose another path") from (None if refused else error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's threads from printing tracebacks of errors that are raised here, too."""
    logger, before = logging.getLogger("absl"), sys.unraisablehook

    def is_shown(record: logging.LogRecord) -> bool:
        return not (record.exc_info and _is_of_orbax(record.pathname))

    def hook(left: Any) -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(left.exc_traceback)]
        if not (any(map(_is_of_orbax, files)) or str(left.exc_value) == "Event loop is closed"):
            before(left)

    logger.addFilter(is_shown)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
        sys.unraisablehook = before


def _is_of_orbax(file: str) -> bool:
    return file.startswith(os.path.dirname(ocp.__file__))


def _let_go(error: Exception) -> None:
    """Reads and writes that were under way beside what has failed, and nobody awaits, tell of their ends here."""
    traceback.clear_frames(error.__traceback__)  # which hold them
    time.sleep(SETTLES)
    gc.collect()


def save(folder: Folder, step: int, state: Any) -> None:
    """Save one state, see `Checkpoints`."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, state)


def steps_in(folder: Folder) -> list[int]:
    """The numbers of steps taken by the states in ``folder``, in order; all processes of a job ask.

    Raises:
        ProcessError: they do not see the same folder.
    """
    folder = as_path("checkpoint", folder)
    if not _is_there(folder):
        return []
    with _manager(folder) as manager:
        return sorted(manager.all_steps())


def _is_there(folder: Path) -> bool:
    """Whether there is such a folder, which all processes see: the first leaves a mark in it that the others look for."""
    if jax.process_count() == 1:
        return folder.is_dir()
    first, number = jax.process_index() == 0, 0
    if first and folder.is_dir():
        number = secrets.randbelow(2**30) + UNSEEN + 1
        try:
            _mark(folder, number).touch()
        except OSError:  # one that can be read only
            number = UNSEEN
    number = any_process(number)
    try:
        sees = _mark(folder, number).exists() if number > UNSEEN else folder.is_dir() == bool(number)
    except OSError:  # none may leave before all have looked
        sees = False
    blind = any_process(0 if sees else jax.process_index() + 1)
    if first and number > UNSEEN:
        _mark(folder, number).unlink(missing_ok=True)
    if blind:
        who = (blind - 1, 0) if number else (0, blind - 1)
        raise ProcessError(
            f"process {who[0]} does not see the folder '{folder}' that process {who[1]} sees: give --checkpoint a folder "
            "of a file system that all hosts share"
        )
    return bool(number)


def _mark(folder: Path, number: int) -> Path:
    return folder / f"{MARK}{number}"


def found_step(folder: Folder) -> int | None:
    """The number of steps taken by the latest state in ``folder``, where there is one."""
    return max(steps_in(folder), default=None)


def check_unused(folder: Folder) -> None:
    """Raises DataError where ``folder`` holds the state of another run, beside which that of a new one would be lost."""
    if (step := found_step(folder)) is not None:
        raise DataError(
            f"there is a checkpoint after {step} steps in {folder}: go on from it with --resume, or give another folder"
        )


def latest_step(folder: Folder) -> int:
    """The number of steps taken by the latest state in ``folder``.

    Raises:
        DataError: there is none.
    """
    folder = as_path("checkpoint", folder)
    _check_folder(folder)
    if (step := found_step(folder)) is not None:
        return step
    raise DataError(f"there is no checkpoint in {folder}: train with --checkpoint {folder} first, without --resume")


def restore_latest(folder: Folder, target: Any) -> tuple[int, Any]:
    """The latest state that is whole, and the number of its steps.

    One that is damaged is put aside, as ``damaged-N``, with a warning that names it, and the one before is taken.

    Raises:
        DataError: there is none, none is whole, or they are of another model.
    """
    folder = as_path("checkpoint", folder)
    while True:
        step = latest_step(folder)
        damaged: DamagedError | None = None
        found = None
        try:
            found = _read(folder, step, target)
        except DamagedError as error:
            damaged = error
        if not any_process(damaged is not None):  # before processes share out what each has read
            return step, from_saved_tree(_laid_out(found, to_saved_tree(target)), target)
        damaged = damaged or DamagedError(f"the checkpoint after {step} steps in {folder} is damaged for another process")
        earlier = [n for n in steps_in(folder) if n < step]
        if not earlier:
            raise damaged
        aside = _put_aside(folder, step)
        warn(f"{damaged}; it is put aside as {aside}, and the one after {max(earlier)} steps is taken", CheckpointWarning)


def _put_aside(folder: Path, step: int) -> Path:
    """Rename a state, as the first process of a job does for all; none goes on before it is done."""
    names = itertools.chain([f"damaged-{step}"], (f"damaged-{step}-{n}" for n in itertools.count(2)))
    aside = next(folder / name for name in names if not (folder / name).exists())
    any_process(False)  # all have looked which name is free
    if jax.process_index() == 0:
        with writing("checkpoint", folder):
            (folder / str(step)).rename(aside)
    any_process(False)
    return aside


def restore(folder: Folder, step: int, target: Any) -> Any:
    """The state after ``step`` steps, laid out as ``target`` says: a tree of structs with shardings.

    Raises:
        DataError: the checkpoint is of another model, of a newer jscaler, or damaged.
    """
    folder = as_path("checkpoint", folder)
    return from_saved_tree(_laid_out(_read(folder, step, target), to_saved_tree(target)), target)


def _laid_out(tree: Any, target: Any) -> Any:
    """What was read, as the structs of ``target`` say that it lies; all processes call it."""
    return jax.tree.map(
        lambda leaf, struct: struct.chunks.placed(leaf) if isinstance(struct, ChunkedStruct) else leaf,
        brought_home(tree, target),
        target,
    )


def _read(folder: Path, step: int, target: Any) -> Any:
    """A state as `to_saved_tree` has it, read by Orbax; in a job of several processes each leaf lies on all of them."""
    _check_folder(folder)
    objects, target = target, to_saved_tree(target)
    which = f"the checkpoint after {step} steps in {folder}"
    with _quiet(), _manager(folder) as manager:
        if step not in (known := manager.all_steps()):
            found = f"those after {', '.join(map(str, sorted(known)))}" if known else "none"
            raise DataError(f"there is no state after {step} steps in {folder}; it has {found}")
        written = written_beside(folder, step)
        _check_format(which, written.get("format", FORMAT))
        saved, wanted = _saved_leaves(manager, step), _leaves(target)
        if objects is not target and saved.keys() == (older := _leaves(objects, whole=False)).keys():
            target, wanted = objects, older  # as they were written until November 2026
        if saved.keys() == wanted.keys() and saved != wanted:  # Orbax would say it in a hundred lines
            raise DataError(_foreign(which, saved, wanted))
        try:
            found = manager.restore(step, args=ocp.args.StandardRestore(spread_structs(target)))
            if _types(found) != _types(target):  # it does not know any more which of its numbers are a key
                raise DamagedError("its leaves have other types than were saved")
            return to_saved_tree(found)
        except Exception as error:  # of whatever class
            if is_out_of_memory(error):
                raise
            _let_go(error)
            if not _is_damage(error):
                raise DataError(f"{which} cannot be read: {_line(error)}; it stays as it is{_remedy(error)}") from error
            if saved and saved != wanted:
                raise DataError(_foreign(which, saved, wanted)) from error
            if _numbers(by := str(written.get("orbax", ""))) > _numbers(ocp.__version__):
                raise DataError(
                    f"{which} cannot be read: Orbax {by} has written it, and this one is {ocp.__version__} "
                    f"({_line(error)}); pip install --upgrade orbax-checkpoint"
                ) from error
            raise DamagedError(
                f"{which} is damaged: {_line(error)}; remove {folder / str(step)} to go on from an earlier one, if there "
                "is one, or train anew into another folder"
            ) from None


def _is_damage(error: Exception) -> bool:
    """Whether a state that could not be read is at fault, and not what it lies on, nor who reads it."""
    if isinstance(error, READERS_OWN):
        return False
    if isinstance(error, OSError):
        return error.errno in DAMAGED and not PASSING.search(str(error))
    return not isinstance(error, MemoryError) and not PASSING.search(str(error))


def _remedy(error: Exception) -> str:
    """What is left to do about a state that cannot be read, and is not damaged."""
    return ", and Orbax cannot read it: train anew into another folder" if isinstance(error, READERS_OWN) else ": try again"


def read(folder: Folder, step: int, entry: str | None = None) -> Any:
    """The state after ``step`` steps as it was written, as dicts and lists of numpy arrays; of a random key its words.

    Args:
        entry: of a state that is a dict, or a Flax train state, the one that is read alone, if it has one of this name.

    Raises:
        DataError: there is none, or it is damaged.
    """
    folder = as_path("checkpoint", folder)
    if not folder.is_dir():  # which Orbax would make
        raise DataError(f"there is no checkpoint in {folder}: it is no folder; give the one that was trained into")
    with _quiet(), _manager(folder) as manager:
        if step not in (known := sorted(manager.all_steps())):
            raise DataError(
                f"there is no state after {step} steps in {folder}; it has {', '.join(map(str, known)) or 'none'}"
            )
        try:
            if (about := manager.item_metadata(step)) is None:
                raise DamagedError("it does not say what is in it")
            wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), about.tree)
            if not isinstance(wanted, dict) or entry not in wanted:
                return manager.restore(step, args=ocp.args.StandardRestore(wanted))
            wanted = {entry: wanted[entry]}
            how = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(folder.absolute() / str(step) / ITEM, args=how)
        except Exception as error:  # of whatever class
            _let_go(error)
            which = f"the checkpoint after {step} steps in {folder}"
            if not _is_damage(error):
                raise DataError(f"{which} cannot be read: {_line(error)}; it stays as it is{_remedy(error)}") from error
            raise DamagedError(f"{which} is damaged: {_line(error)}; give another --step") from None


def _manager(folder: Path, **options: Any) -> ocp.CheckpointManager:
    """Of one damaged state it opens the others all the same; and it knows how to read what a state says of itself."""
    given = ocp.CheckpointManagerOptions(
        lightweight_initialize=True, async_options=ocp.options.AsyncOptions(timeout_secs=LONGEST_WRITE), **options
    )
    return ocp.CheckpointManager(folder.absolute(), item_handlers=ocp.StandardCheckpointHandler(), options=given)


def _types(tree: Any) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def written_beside(folder: Folder, step: int) -> dict[str, Any]:
    """What `save` has said of a state; nothing where an older jscaler, or a script, has written it.

    It is read as Orbax writes it: asked for it, Orbax reads all of the state's metadata, which it may not know.
    """
    folder = as_path("checkpoint", folder)
    try:
        return dict(json.loads((folder / str(step) / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["jscaler"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _check_format(which: str, found: Any) -> None:
    if found != FORMAT:
        raise DataError(
            f"{which} is of format {found}, and this jscaler reads format {FORMAT}: a newer jscaler has written it; go on "
            "with that one, or train anew into another folder"
        )


def _numbers(version: str) -> list[int]:
    """``0.12.8`` as numbers that can be compared."""
    return [int(part) for part in re.findall(r"\d+", version)]


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"'{folder}' is a file, and a checkpoint is a folder; give --checkpoint the folder that was trained into"
        )


def _foreign(which: str, saved: dict[str, tuple[str, str]], wanted: dict[str, tuple[str, str]]) -> str:
    only = [[f"'{name}'" for name in a if name not in b] for a, b in ((saved, wanted), (wanted, saved))]
    parts = [f"only {who} has {', '.join(n[:2])} and {len(n)} such in all" for n, who in zip(only, SIDES, strict=True) if n]
    if not parts:
        differing = [name for name in wanted if saved[name] != wanted[name]]
        first = differing[0]
        there, here = saved[first], wanted[first]
        of = int(there[0] == here[0])  # the shape, or else the dtype
        parts = [
            f"{len(differing)} of {len(wanted)} leaves differ, the first is '{first}', {there[of]} there and "
            f"{here[of]} here"
        ]
    return (
        f"{which} is of another model or optimizer: {' and '.join(parts)}; give the --model, --size and options that it "
        "was trained with, or another --checkpoint"
    )


def _saved_leaves(manager: ocp.CheckpointManager, step: int) -> dict[str, tuple[str, str]]:
    """The leaves of a saved state; none where it is damaged."""
    try:
        return _leaves(manager.item_metadata(step))
    except Exception:  # what is wrong with the state itself will be said
        return {}


def _leaves(tree: Any, whole: bool = True) -> dict[str, tuple[str, str]]:
    """Shape and dtype of each leaf as text, by its path, which Orbax writes as dicts and lists.

    Args:
        whole: whether what has a shape is a leaf; else an nnx Variable holds one.
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: whole and hasattr(leaf, "shape"))[0]
    arrays = [(tree_path("", path), _stored(leaf)) for path, leaf in found if hasattr(leaf, "shape")]
    return {path: (f"[{', '.join(map(str, leaf.shape))}]", str(leaf.dtype)) for path, leaf in arrays}


def _stored(leaf: Any) -> Any:
    """A leaf as Orbax stores it: of a random key, its numbers."""
    is_key = leaf.dtype is not None and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf


def _refused(error: Exception) -> str:
    """What the operating system has said, where it has refused to write; else nothing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = OS_ERROR.search(str(error))
    return os.strerror(int(found[1])) if found else ""


def _line(error: Exception) -> str:
    """The first line that an error says, cut where it is long; of an own one no more than its sentence."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, JscalerError):
        return text
    text = text.partition(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
