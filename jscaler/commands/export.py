"""``jscaler export``: the parameters of a checkpoint as one file, for programs that know nothing of jscaler."""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from jscaler.commands.screen import screen, show
from jscaler.errors import DataError, JscalerError, OutputError, UnknownNameError
from jscaler.report.written import written_whole
from jscaler.text.units import counted, readable_bytes

KINDS = (".safetensors", ".msgpack")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="the folder that was trained into")],
    out: Annotated[Path, typer.Argument(help="the file: .safetensors, or .msgpack as flax.serialization reads it")],
    part: Annotated[str, typer.Option(help="of the state, as in params or params/decoder; . for all of it")] = "params",
    step: Annotated[int | None, typer.Option(help="of the state after so many steps; the latest by default", min=0)] = None,
) -> None:
    """Write the parameters of a checkpoint to one file: safetensors, or what flax.serialization.msgpack_restore reads.

    They are read into this machine's memory first.

    Example: jscaler export --part params runs/nano nano.safetensors

    Example: jscaler export --step 40 runs/nano nano.msgpack
    """
    from jscaler.runtime.checkpoint import latest_step, read

    if out.suffix not in KINDS:
        raise OutputError(f"'{out}' is of no kind that is known: name it {' or '.join('*' + kind for kind in KINDS)}")
    number = latest_step(checkpoint) if step is None else step
    tree = _part(read(checkpoint, number, part.partition("/")[0]), part)
    arrays = jax.tree.map(np.asarray, tree)
    with written_whole("export", out) as half:
        (_as_safetensors if out.suffix == ".safetensors" else _as_msgpack)(half, arrays)
    leaves = jax.tree.leaves(arrays)
    size = readable_bytes(sum(leaf.nbytes for leaf in leaves))
    show(screen(), f"{counted(len(leaves), 'array')}, {size}, of the state after {counted(number, 'step')}: {out}")


def _part(state: Any, path: str) -> Any:
    found = state
    for name in [] if path == "." else path.split("/"):
        named = {str(i): one for i, one in enumerate(found)} if isinstance(found, list) else found
        known = named if isinstance(named, dict) else {}  # an array has no parts
        if name not in known:
            raise UnknownNameError("part", name, list(known), f" of '{path}' in the checkpoint")
        found = known[name]
    return found


def _as_msgpack(path: Path, tree: Any) -> None:
    from flax import serialization

    path.write_bytes(serialization.to_bytes(tree))


def _as_safetensors(path: Path, tree: Any) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise JscalerError(
            '.safetensors needs safetensors, which is not installed: pip install "jscaler[export]"'
        ) from None
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys): x for keys, x in found}
    if not named:
        raise DataError("there is no array to write")
    save_file(named, path)
