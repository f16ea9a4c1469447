"""A profile in place of the model: a step in pieces, keys that equal programs share, and what a file does to estimates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from lower.steps import MOMENTUM, make_batch, make_state, make_step, tensor_parallel
from typer.testing import CliRunner

import jscaler
from jscaler.cli import app
from jscaler.clusters import find_cluster
from jscaler.errors import DeviceError
from jscaler.estimate.pieces import op_pieces, pieces_of
from jscaler.estimate.profile import Profile, load_profile, measure_piece, missing
from jscaler.lower.flat_program import Exchange, FlatLoop, all_items

H100 = find_cluster("8xH100-80GB")
NAME = "NVIDIA H100 80GB HBM3"
HERE = (NAME, jax.__version__)


def lowered(plan: Any, devices: int) -> Any:
    return jscaler.parallelize(plan, devices=devices)(make_step()).lower(make_state(MOMENTUM), make_batch())


def stacked(layers: int = 3) -> Any:
    """A scan of layers under tensor parallelism: an all-reduce in each iteration."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"up": jnp.zeros((layers, 8, 16)), "down": jnp.zeros((layers, 16, 8))}
    return jscaler.parallelize("tensor_parallel", devices=4)(step).lower(params, jnp.zeros((4, 8)))


STEPS = {
    "one device": lambda: lowered("single", 1),
    "split": lambda: lowered(tensor_parallel, 4),
    "a stack": stacked,
    "a pipeline": lambda: lowered("pipeline(2, 2)", 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_equation_is_in_one_piece_and_nothing_is_sent_in_it(name: str) -> None:
    for block in STEPS[name]().plan.blocks:
        pieces = pieces_of(block)
        inside = [id(item) for piece in pieces for item in all_items(piece.items)]
        assert len(inside) == len(set(inside))
        every = [item for item in all_items(block.flat.items) if isinstance(item, core.JaxprEqn)]
        assert {id(item) for item in every} <= set(inside)
        assert not any(isinstance(item, Exchange) for piece in pieces for item in all_items(piece.items))
        lengths = {item.loop.length for item in all_items(block.flat.items) if isinstance(item, FlatLoop)}
        assert {piece.times for piece in pieces} <= {1, *lengths}
        for piece in pieces:
            out = jax.eval_shape(piece.run, *piece.inputs)
            assert all(isinstance(x, jax.ShapeDtypeStruct) for x in out)


def test_pieces_one_after_another_give_the_step_s_numbers() -> None:
    made = lowered("accumulate(2)", 1)
    (block,) = made.plan.blocks
    state, batch = make_state(MOMENTUM), make_batch()
    leaves = dict(zip(made.plan.graph.inputs, jax.tree.leaves((state, batch)), strict=True))
    values = {var: leaves[tensor] for var, tensor in zip(block.flat.inputs, block.takes, strict=True)}
    for piece in pieces_of(block):
        values |= dict(zip(piece.leaves, piece.run(*(values[v] for v in piece.reads)), strict=True))
    expected = jax.tree.leaves(jax.jit(make_step())(state, batch))
    assert len(block.results) == len(expected)
    for number, var in zip(block.results, block.flat.outputs, strict=True):
        np.testing.assert_allclose(values[var], expected[number], rtol=1e-5, atol=1e-6)


def test_equal_programs_have_one_key_and_others_another() -> None:
    """Six equal layers; of another width none is equal."""

    def keys(width: int) -> tuple[int, set[str]]:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            for number, layer in enumerate(params):
                with jax.named_scope(f"layer_{number}"):
                    x = jnp.tanh(x @ layer)
            return jnp.sum(x * x)

        def step(params: Any, x: jax.Array) -> Any:
            value, grads = jscaler.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - g, params, grads), value

        params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 6
        made = jscaler.parallelize("single", devices=1)(step).lower(params, jax.ShapeDtypeStruct((4, width), jnp.float32))
        every = [piece for _, piece in op_pieces(made.plan)]
        return len(every), {piece.key for piece in every}

    (count, one), (_, other) = keys(8), keys(16)
    assert len(one) < count / 2
    assert not one & other


def test_a_profile_of_all_pieces_is_the_estimate() -> None:
    made = stacked()
    (block,) = made.plan.blocks
    pieces = pieces_of(block)
    seconds = {piece.key: 1e-3 * (1 + number) for number, piece in enumerate(pieces)}
    plain, found = jscaler.cost(made, H100), jscaler.cost(made, None, H100, profile=Profile({HERE: seconds}))
    assert found.profiled is not None
    assert found.profiled.pieces == len(pieces) > 2
    inside = sum(piece.times * seconds[piece.key] for piece in pieces)
    assert found.seconds.compute is not None
    # stacks of loops in which something is sent are no part of a piece: the model has them
    assert inside <= found.seconds.compute <= inside + (plain.seconds.compute or 0.0)
    assert found.seconds.compute == pytest.approx(sum(op.seconds or 0.0 for op in found.by_op.values()))
    assert found.seconds.communication == plain.seconds.communication
    assert found.profiled.by_model < 0.05
    assert (plain.profiled, found.bound) == (None, plain.bound)
    assert "from the profile: " in str(found)
    assert found.as_json()["profiled"]["pieces"] == len(pieces)


def test_what_a_profile_lacks_the_model_prices_and_it_is_counted() -> None:
    made = lowered(tensor_parallel, 4)
    plain = jscaler.cost(made, H100)
    empty = jscaler.cost(made, None, H100, profile=Profile())
    assert empty.by_op == plain.by_op
    assert empty.profiled is not None
    assert (empty.profiled.pieces, empty.profiled.ops, empty.profiled.by_model) == (0, 0, pytest.approx(1))
    other = jscaler.cost(made, None, H100, profile=Profile({("another device", jax.__version__): {"a": 1.0}}))
    assert other.profiled == empty.profiled
    dot = next(piece for op, piece in op_pieces(made.plan) if op.path == "up/dot")
    found = jscaler.cost(made, None, H100, profile=Profile({HERE: {dot.key: 0.5}}))
    assert found.profiled is not None
    assert found.profiled.ops >= 1
    assert found.by_op["up/dot"].seconds == pytest.approx(0.5)
    assert found.by_op["down/dot"] == plain.by_op["down/dot"]


def test_collectives_are_no_computing() -> None:
    """What stands between pieces takes the time of the links alone, whatever its op takes by itself."""
    made = lowered("data_parallel", 4)
    every = [*pieces_of(made.plan.blocks[0]), *(piece for _, piece in op_pieces(made.plan))]
    found = jscaler.cost(made, None, H100, profile=Profile({HERE: dict.fromkeys((p.key for p in every), 1.0)}))
    assert found.seconds.compute == pytest.approx(sum(piece.times for piece in pieces_of(made.plan.blocks[0])))
    assert found.profiled is not None
    assert (found.profiled.modelled, found.profiled.by_model) == (0, 0)


def test_programs_with_effects_or_loops_of_unknown_length_are_left_to_the_model() -> None:
    def told(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: pytest.fail(f"run with {value}"), x[0, 0])
        return x @ x

    def open_end(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 1e9, lambda y: y @ x, x)

    for fun, runs in ((told, False), (open_end, False), (lambda x: x @ x, True)):
        made = jscaler.parallelize("single", devices=1)(fun).lower(jnp.ones((4, 4)))
        pieces = pieces_of(made.plan.blocks[0])
        assert [piece.runs_alone for piece in pieces] == [runs] * len(pieces)
        assert bool(missing(pieces, Profile(), "cpu")) == runs


def test_keys_are_of_the_program_s_own_kind() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    made = jscaler.parallelize("single", devices=1)(lambda k: jax.random.normal(k, (4, 4))).lower(key)
    (piece,) = pieces_of(made.plan.blocks[0])
    assert measure_piece(piece, jax.devices()[0], 1) > 0


def test_a_file_is_read_back_and_a_wrong_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = Profile({HERE: {"a": 0.25}}, {"a": "up/dot"})
    profile.save(path)
    assert load_profile(path) == profile
    made = lowered("single", 1)
    assert (
        jscaler.cost(made, None, H100, profile=path).profiled == jscaler.cost(made, None, H100, profile=str(path)).profiled
    )
    negative = json.dumps({"version": 1, "places": [{"device": "x", "jax": "y", "seconds": {"a": -1}}], "about": {}})
    for text in (negative, "", "[]", "{}", '{"version": 9}', '{"version": 1, "places": [{"device": "x"}], "about": {}}'):
        path.write_text(text)
        with pytest.raises(DeviceError, match=r"cannot read the profile .*jscaler profile --out"):
            load_profile(path)
    with pytest.raises(DeviceError, match="cannot read the profile"):
        jscaler.cost(made, None, H100, profile=tmp_path / "nowhere.json")
    with pytest.raises(DeviceError, match="a profile is of a kind of device, and cluster 'cpu' does not say"):
        jscaler.cost(made, None, "cpu", profile=profile)


def test_a_piece_is_measured() -> None:
    made = lowered(tensor_parallel, 4)
    piece = pieces_of(made.plan.blocks[0])[0]
    assert 0 < measure_piece(piece, jax.devices()[0], 2) < 1
    profile = Profile()
    assert missing([piece, piece], profile, "cpu") == [piece]
    profile.add(piece, "cpu", 1e-3)
    assert missing([piece], profile, "cpu") == []
    assert profile.about[piece.key] == piece.about


@pytest.mark.one_day_in(5)
def test_the_command_measures_once_and_costs_read_its_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "profile.json"
    model = ["--model", "gpt-nano", "--batch", "2", "--seq", "8", "--plan", "data_parallel", "--devices", "2"]
    words = ["profile", *model, "--whole", "--platform", "cpu", "--out", str(path), "--json"]
    first, second = (json.loads(CliRunner().invoke(app, words).output.splitlines()[-1]) for _ in range(2))
    assert first["measured"]
    assert second["measured"] == []
    profile = load_profile(path)
    assert profile.seconds[first["device"], jax.__version__].keys() == {one["key"] for one in first["measured"]}
    assert H100.device is not None
    like = dataclasses.replace(H100, device=dataclasses.replace(H100.device, description=first["device"]))
    assert jscaler.cost(lowered("data_parallel", 2), None, like, profile=profile).profiled is not None
