"""``jscaler export``: the parameters of a checkpoint as one file, for programs that know nothing of jscaler."""

from collections.abc import Sequence
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
PARAMETERS = "params"
OPTIMIZER = {"opt_state", "step"}  # what an ``nnx.Optimizer`` has


def export(
    checkpoint: Annotated[Path, typer.Argument(help="the folder that was trained into")],
    out: Annotated[Path, typer.Argument(help="the file: .safetensors, or .msgpack as flax.serialization reads it")],
    part: Annotated[
        str | None, typer.Option(help="of the state, as in params/decoder; . for all; params by default, or the nnx module")
    ] = None,
    step: Annotated[int | None, typer.Option(help="of the state after so many steps; the latest by default", min=0)] = None,
) -> None:
    """Write the parameters of a checkpoint to one file: safetensors, or what flax.serialization.msgpack_restore reads.

    They are read into this machine's memory first.

    Example: jscaler export --part params runs/nano nano.safetensors

    Example: jscaler export --step 40 runs/nano nano.msgpack
    """
    from jscaler.runtime.checkpoint import latest_step, read, written_beside

    if out.suffix not in KINDS:
        raise OutputError(f"'{out}' is of no kind that is known: name it {' or '.join('*' + kind for kind in KINDS)}")
    number = latest_step(checkpoint) if step is None else step
    modules = () if part else written_beside(checkpoint, number).get("modules", ())
    first = part or (modules[0] if len(modules) == 1 else PARAMETERS)
    state = read(checkpoint, number, first.partition("/")[0])
    arrays = jax.tree.map(np.asarray, _without_value(_part(state, part) if part else _model(state, modules)))
    with written_whole("export", out) as half:
        (_as_safetensors if out.suffix == ".safetensors" else _as_msgpack)(half, arrays)
    leaves = jax.tree.leaves(arrays)
    size = readable_bytes(sum(leaf.nbytes for leaf in leaves))
    show(screen(), f"{counted(len(leaves), 'array')}, {size}, of the state after {counted(number, 'step')}: {out}")


def _model(state: Any, modules: Sequence[str]) -> Any:
    """The parameters; of nnx objects the modules, by their names where they are several.

    Args:
        modules: which they are, where `save` has said it; else all but the optimizers, if that is one.
    """
    known = _parts(state)
    if not modules and PARAMETERS not in known:
        optimizers = {name for name, one in known.items() if _parts(one).keys() >= OPTIMIZER}
        others = [name for name, one in known.items() if name not in optimizers and _parts(one)]
        modules = others if optimizers and len(others) == 1 else ()
    if len(modules) > 1:
        return {name: _part(state, name) for name in modules}
    return _part(state, modules[0] if modules else PARAMETERS)


def _without_value(tree: Any) -> Any:
    """Leaves in the place of the Variables that Orbax writes of an ``nnx.State``: each a dict with its ``value`` alone."""

    def is_variable(one: Any) -> bool:
        return isinstance(one, dict) and one.keys() == {"value"} and not _parts(one["value"])

    found = jax.tree.leaves(tree, is_leaf=is_variable)
    return jax.tree.map(lambda one: one["value"], tree, is_leaf=is_variable) if all(map(is_variable, found)) else tree


def _parts(tree: Any) -> dict[str, Any]:
    """By name; an array has none."""
    named = {str(i): one for i, one in enumerate(tree)} if isinstance(tree, list) else tree
    return named if isinstance(named, dict) else {}


def _part(state: Any, path: str) -> Any:
    found = state
    for name in [] if path == "." else path.split("/"):
        known = _parts(found)
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
