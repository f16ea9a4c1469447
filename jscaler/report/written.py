"""Where results go: whether something can be written there, asked before hours of work and not after them."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jscaler.errors import OutputError, shown


@contextlib.contextmanager
def writing(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """What goes wrong within is that ``what`` cannot be written to ``path``.

    Raises:
        OutputError: the operating system refuses: no such place, no permission, no space left.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write the {what} '{path}': {error.strerror or error}; choose another path") from error


@contextlib.contextmanager
def written_whole(what: str, path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place at the end: a file is whole, or as it was.

    Raises:
        OutputError: as `writing`.
    """
    half = path.with_name(f".{path.name}.half")
    with writing(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield half
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


def as_path(what: str, path: Any) -> Path:
    """``path`` of what is to be written, with "~" as one's home; raises OutputError where it is none."""
    if isinstance(path, str | os.PathLike):
        return Path(path).expanduser()
    raise OutputError(f"the {what} is written to a path, as text or a pathlib.Path, not to {shown(path)}")


def check_file(what: str, path: Path | None) -> None:
    """Raises OutputError where no file can be written at ``path``, whose folder is made; one that is there stays.

    Where none is there, none is made: another process may ask the same, or begin to write, at that moment.
    """
    if path is None:
        return
    with writing(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("a").close()
        else:
            with tempfile.NamedTemporaryFile(prefix=path.name, dir=path.parent):
                pass


def check_folder(what: str, path: Path | None) -> None:
    """Raises OutputError where ``path`` is no folder, and none that can be made, in which files can be written."""
    if path is None:
        return
    if scheme := re.match(r"([a-z][a-z0-9+]+):/", str(path)):
        raise OutputError(
            f"cannot write the {what} '{path}': it is a URL ({scheme[1]}), and a folder is wanted; mount it, and give the "
            "path where it is mounted"
        )
    with writing(what, path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
