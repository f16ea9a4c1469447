"""Parameters of a checkpoint as one file, read by libraries that know nothing of jscaler."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from safetensors import safe_open
from safetensors.flax import load_file
from typer.testing import CliRunner

from jscaler import DataError, OutputError, UnknownNameError
from jscaler.cli import app
from jscaler.runtime.checkpoint import read, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States after 2 and 4 steps; a leaf lies in parts on two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    path = tmp_path_factory.mktemp("run")
    for step in (2, 4):
        kernel = jax.device_put(jnp.full((2, 3), step, jnp.bfloat16), split)
        layers = [{"bias": jnp.arange(3.0) + step}, {"bias": jnp.zeros(3)}]
        save(path, step, {"params": {"head": {"kernel": kernel}, "layers": layers}, "key": jax.random.key(7)})
    return path


def export(*words: Any) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    return " ".join(result.output.split()), result.exception


def test_both_kinds_hold_the_parameters(folder: Path, tmp_path: Path) -> None:
    output, error = export(folder, tmp_path / "new" / "net.safetensors")
    assert error is None, output
    assert "3 arrays, 36 B, of the state after 4 steps" in output
    found = load_file(tmp_path / "new" / "net.safetensors")
    assert sorted(found) == ["head.kernel", "layers.0.bias", "layers.1.bias"]
    assert found["head.kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["layers.0.bias"], [4, 5, 6])
    with safe_open(tmp_path / "new" / "net.safetensors", "np") as file:
        assert len(list(file.keys())) == 3
    assert export(folder, tmp_path / "net.msgpack", "--step", 2)[1] is None
    tree = serialization.msgpack_restore((tmp_path / "net.msgpack").read_bytes())
    np.testing.assert_array_equal(tree["head"]["kernel"], np.full((2, 3), 2))
    np.testing.assert_array_equal(tree["layers"]["0"]["bias"], [2, 3, 4])
    assert export(folder, tmp_path / "all.msgpack", "--part", ".")[1] is None
    whole = serialization.msgpack_restore((tmp_path / "all.msgpack").read_bytes())
    np.testing.assert_array_equal(whole["key"], jax.random.key_data(jax.random.key(7)))
    assert {path.name for path in tmp_path.iterdir()} == {"new", "net.msgpack", "all.msgpack"}


def test_the_rest_of_the_state_is_not_read(folder: Path) -> None:
    whole, params = read(folder, 4), read(folder, 4, "params")
    assert (whole.keys(), params.keys()) == ({"params", "key"}, {"params"})
    jax.tree.map(np.testing.assert_array_equal, params["params"], whole["params"])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)


NAMES = ["layers.0.bias", "layers.0.kernel", "norm.bias", "norm.mean", "norm.scale", "norm.var"]


def objects(**more: Any) -> dict[str, Any]:
    net = Net(nnx.Rngs(0))
    return {"net": net, "optimizer": nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param), **more}


@pytest.mark.parametrize("kind", ["dict", "tuple", "alone", "beside metrics", "states", "by Orbax alone"])
def test_the_module_of_an_nnx_job_is_found(kind: str, tmp_path: Path) -> None:
    state: Any = objects(rngs=nnx.Rngs(1)) if kind == "beside metrics" else objects()
    net, optimizer = state["net"], state["optimizer"]
    state = {"tuple": (optimizer, net), "alone": net, "states": nnx.state((net, optimizer))}.get(kind, state)
    if kind == "by Orbax alone":  # each Variable as a dict with its value
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, args=ocp.args.StandardSave({name: nnx.state(one) for name, one in state.items()}))
    else:
        save(tmp_path / "run", 1, state)
    output, error = export(tmp_path / "run", tmp_path / "net.safetensors")
    assert error is None, output
    found = load_file(tmp_path / "net.safetensors")
    assert sorted(found) == NAMES
    np.testing.assert_array_equal(found["layers.0.kernel"], net.layers[0].kernel[...])


def test_several_modules_have_their_names(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, objects(teacher=Net(nnx.Rngs(1))))
    assert export(tmp_path / "run", tmp_path / "both.safetensors")[1] is None
    assert sorted(load_file(tmp_path / "both.safetensors")) == [f"{one}.{n}" for one in ("net", "teacher") for n in NAMES]


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("net.pt",), OutputError, r"is of no kind that is known: name it \*\.safetensors or \*\.msgpack"),
        (
            ("net.msgpack", "--part", "params/tail"),
            UnknownNameError,
            "no part named 'tail' of 'params/tail' in the checkpoint; known",
        ),
        (("net.msgpack", "--step", 3), DataError, "there is no state after 3 steps in .*; it has 2, 4"),
    ],
)
def test_mistakes(folder: Path, tmp_path: Path, words: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        raise export(folder, tmp_path / words[0], *words[1:])[1] or AssertionError
    assert not list(tmp_path.iterdir())
