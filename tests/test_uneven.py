"""Steps whose ops are split into unequal parts give one device's numbers, and are proven."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import losing
from lower.steps import ADAMW, MOMENTUM, assert_same_numbers, make_batch, make_state, make_step, planned, tied_loss
from of_the_day import of_the_day

import jscaler
from jscaler import Split


def split(graph: Any, path: str, what: tuple[str, int], sizes: tuple[int, ...], devices: np.ndarray) -> None:
    graph.op_assign(graph.op_trans(graph[path], Split(what, sizes=sizes)), devices)


def hidden(graph: Any, devices: np.ndarray) -> None:
    """First kernel by columns, second by rows."""
    sizes = (5, 3, 8)
    split(graph, "up/dot", ("kernel", 1), sizes, devices)
    split(graph, "up/add", ("bias", 0), sizes, devices)
    split(graph, "act/tanh", ("up/add:0", 1), sizes, devices)
    split(graph, "down/dot", ("kernel", 0), sizes, devices)


def first_layer(graph: Any, devices: np.ndarray) -> None:
    split(graph, "up/dot", ("kernel", 1), (5, 3, 8), devices)


def batch(graph: Any, devices: np.ndarray) -> None:
    split(graph, "up/dot", ("batch/x", 0), (6, 6, 4), devices)  # the blocks that 16 in 3 gives
    split(graph, "loss/reduce_sum", ("batch/y", 0), (4, 7, 5), devices)


def batch_and_columns(graph: Any, devices: np.ndarray) -> None:
    cells = graph.op_trans(graph["up/dot"], Split("a", sizes=(10, 6)), Split("c", sizes=(9, 7)))
    graph.op_assign(cells, devices.reshape(2, 2))


def in_any_order(graph: Any, devices: np.ndarray) -> None:
    split(graph, "up/dot", ("kernel", 1), (5, 3, 8), devices)
    graph.op_assign(graph.op_trans(graph["down/dot"], Split(("kernel", 0), sizes=(8, 3, 5))), devices, any_order=True)


@pytest.mark.parametrize(
    ("policy", "devices"),
    of_the_day([(hidden, 3), (batch, 3), (batch_and_columns, 4), (in_any_order, 3)], 2),
    ids=lambda p: getattr(p, "__name__", p),
)
def test_optimizer_steps_are_those_of_one_device(policy: Any, devices: int) -> None:
    assert_same_numbers(policy, devices)


def channels(graph: Any, devices: np.ndarray) -> None:
    """A norm over channels is cut behind its mean and its variance; every piece has the same parts."""
    graph.op_assign(graph.op_trans(graph["norm/rsqrt"], Split("b", sizes=(5, 3, 8))), devices)


@losing
@pytest.mark.parametrize(("policy", "devices"), [(batch_and_columns, 4), (channels, 3)], ids=["grid", "channels"])
def test_joined_gradients_norms_and_softmax(policy: Any, devices: int) -> None:
    assert_same_numbers(policy, devices, tied_loss, ADAMW)


@pytest.mark.smoke
def test_what_follows_and_the_backward_have_the_same_parts() -> None:
    plan = planned(first_layer, 3)
    for path in ("up/dot", "up/add", "act/tanh", "down/dot", "down/dot@backward", "act/tanh@backward", "up/dot@backward"):
        assert set(plan.completed.ops[path].placement.sizes.values()) == {(5, 3, 8)}, path
    assert "a:5+3+8" in plan.explain()
    assert "c:5+3+8" in str(plan.plan)


def test_what_a_smaller_part_has_beyond_its_own_may_be_nan() -> None:
    """Zeros beyond a part make log and quotient infinite, forward and backward."""
    step = jscaler.parallelize(logs, devices=3)(jscaler.value_and_grad(quotients))
    with jax.enable_x64(True):
        x, w = (jax.random.uniform(jax.random.key(i), shape, minval=0.5) for i, shape in enumerate([(7, 4), (4, 5)]))
        loss, grads = step(w, x)
        expected, theirs = jax.jit(jax.value_and_grad(quotients))(w, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        np.testing.assert_allclose(grads, theirs, rtol=1e-12)


def quotients(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("dot"):
        y = x @ w
    with jax.named_scope("log"):
        y = (jnp.log(y) / y).max(1) + (1 / x).sum(1)
    return y.mean()


def logs(graph: Any, devices: np.ndarray) -> None:
    for op in graph.forward():
        factor = graph.factor_of("x", 0).get(op)
        if factor is not None:
            graph.op_assign(graph.op_trans(op, Split(factor, sizes=(2, 4, 1))), devices)


def attention_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Four heads of two."""
    x = batch["x"].reshape(2, 8, 8)
    with jax.named_scope("qkv"):
        q, k, v = (
            jnp.einsum("bsd,dhk->bshk", x, params["up"]["kernel"].reshape(8, 4, 4)[..., i : i + 2]) for i in (0, 1, 2)
        )
    with jax.named_scope("scores"):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    with jax.named_scope("mix"):
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    with jax.named_scope("out"):
        y = jnp.einsum("bqhd,hdo->bqo", mixed, params["down"]["kernel"].reshape(4, 4, 8)[:, :2])
    return optax.l2_loss(y.reshape(16, 8), batch["y"]).mean()


def heads(graph: Any, devices: np.ndarray) -> None:
    for op in graph.select("scores/*"):
        names = [f.name for f in graph.rule(op).factors.values() if f.size == 4 and f.kind != "blocked"]
        graph.op_assign(graph.op_trans(op, Split(names[0], sizes=(3, 1))), devices)


def test_heads() -> None:
    assert_same_numbers(heads, 2, attention_loss)


def test_state_is_stored_whole() -> None:
    """No NamedSharding says 5 + 3 + 8, nor 6 + 6 + 4."""
    for policy in (hidden, batch):
        lowered = jscaler.parallelize(policy, devices=3)(make_step()).lower(make_state(MOMENTUM), make_batch())
        assert all(layout.even and layout.partition_spec() is not None for layout in lowered.plan.completed.inputs.values())


def test_a_cast_in_front_of_a_padded_exchange_is_proven() -> None:
    """Integers are cast and then cut into 2 + 1 rows: the exchange stays behind the cast, since it pads."""

    def fun(i: jax.Array) -> Any:
        with jax.named_scope("cast"):
            x = jnp.sort(i).astype(jnp.float32)
        with jax.named_scope("use"):
            return x, jnp.sin(x)

    def rows(graph: Any, devices: np.ndarray) -> None:
        (op,) = graph.select("use/*", kind=None)
        graph.op_assign(graph.op_trans(op, Split("a", sizes=(2, 1))), devices)

    numbers = jnp.arange(3, dtype=jnp.int16)
    step = jscaler.parallelize(rows, devices=2)(fun)
    jscaler.verify(step.lower(numbers))
    for ours, theirs in zip(step(numbers), fun(numbers), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_rows_of_images_that_are_dealt_unequally() -> None:
    """A padded image sends its edge rows, too; the kernel's gradient leaves it out."""

    def loss(kernel: jax.Array, images: jax.Array) -> jax.Array:
        with jax.named_scope("conv"):
            dims = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims)
        with jax.named_scope("pool"):
            y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 1, 1), (1, 2, 1, 1), "SAME")
        with jax.named_scope("log"):
            return jnp.log(jnp.abs(y)).sum()

    def images_and_rows(graph: Any, devices: np.ndarray) -> None:
        images, rows = (graph.factor_of("images", dim) for dim in (0, 1))
        for op in graph.forward():
            grid = graph.op_trans(op, Split(images[op], sizes=(2, 1)), Split(rows[op], 2))
            graph.op_assign(grid, devices.reshape(2, 2))

    with jax.enable_x64(True):
        kernel, images = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(3, 3, 2, 2), (3, 8, 4, 2)]))
        step = jscaler.parallelize(images_and_rows, devices=4)(jscaler.value_and_grad(loss))
        jscaler.verify(step.lower(kernel, images))
        for ours, true in zip(step(kernel, images), jax.jit(jax.value_and_grad(loss))(kernel, images), strict=True):
            np.testing.assert_allclose(ours, true, rtol=1e-11)
