"""Gradients that stand in front of a backward loop are made there: what they are made of is not kept until after it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from of_the_day import of_the_day

import jscaler
from jscaler.clusters import find_cluster
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram
from jscaler.report.targets import described_devices
from jscaler.runtime.target import WITHOUT_GPU

LAYERS, HIDDEN, ROWS, WORDS = 3, 8, 16, 32
State = dict[str, Any]


def tied(p: State, batch: State) -> jax.Array:
    """A table that is looked up in, layers, and logits by the same table: its gradient is a sum over both ends."""
    x = p["embed"]["embedding"][batch["tokens"]]
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
    with jax.named_scope("logits"):
        logits = x @ p["embed"]["embedding"].T
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["labels"]].mean()


def head(p: State, batch: State) -> jax.Array:
    """The same with a table of its own for the logits, which is narrow: its gradient is larger than the logits."""
    x = p["embed"]["embedding"][batch["tokens"]]
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
    return ((x @ p["head"]) ** 2).mean()


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(p: State, batch: State) -> Any:
        value, gradients = jscaler.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    return step


def params(words: int = WORDS, hidden: int = HIDDEN) -> State:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (words, hidden))},
        "w": jax.random.normal(keys[1], (LAYERS, hidden, hidden)) / hidden,
        "head": jax.random.normal(keys[2], (hidden, 2)),
    }


def data(rows: int = ROWS, words: int = WORDS) -> State:
    return {"tokens": jnp.arange(rows) * 5 % words, "labels": jnp.arange(rows) * 3 % words}


def flat_of(loss: Callable[..., jax.Array], plan: Any, devices: int, rows: int = ROWS) -> FlatProgram:
    return jscaler.parallelize(plan, devices=devices)(step_of(loss)).lower(params(), data(rows)).plan.flat


def wide(p: State, batch: State) -> jax.Array:
    """The same with layers of many hidden units, which are computed again."""
    x = p["embed"]["embedding"][batch["tokens"]]
    x = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) @ w.T, None)), x, p["w"])[0]
    with jax.named_scope("logits"):
        logits = x @ p["embed"]["embedding"].T
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["labels"]].mean()


def shapes(rows: int, words: int, hidden: int, units: int) -> tuple[State, State]:
    """Of the parameters and the batch of ``wide``."""
    shaped = jax.ShapeDtypeStruct
    p = {"embed": {"embedding": shaped((words, hidden), "float32")}, "w": shaped((LAYERS, hidden, units), "float32")}
    return p, {name: shaped((rows,), "int32") for name in ("tokens", "labels")}


def fences_of(items: Sequence[Any]) -> list[core.JaxprEqn]:
    return [items[i] for i in fences(items)]


def fences(items: Sequence[Any]) -> list[int]:
    return [i for i, e in enumerate(items) if isinstance(e, core.JaxprEqn) and e.primitive.name == "optimization_barrier"]


@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("data_parallel", 4), ("vocab_parallel", 2)])
def test_the_loop_waits_for_the_gradient_of_the_table(plan: str, devices: int) -> None:
    rows = 4 * WORDS
    items = flat_of(tied, plan, devices, rows).items
    (fence,) = fences(items)
    backward = items[next(i for i, item in enumerate(items) if i > fence and isinstance(item, FlatLoop))]
    assert backward.loop.forward is not None
    carried, gradient = items[fence].outvars
    assert carried in [init for init, *_ in backward.carries]
    parts = devices if plan == "vocab_parallel" else 1
    assert gradient.aval.shape == (WORDS // parts, HIDDEN)
    dots = [item for item in items[:fence] if getattr(item, "primitive", None) is not None and not item.effects]
    assert items[fence].invars[1] in {v for eqn in dots for v in eqn.outvars}
    sums = [i for i, item in enumerate(items) if isinstance(item, Exchange) and item.input is gradient]
    assert all(i > fence for i in sums)


def checkpointed(p: State, batch: State) -> jax.Array:
    """The same, its layers one by one, computed again."""
    x = p["embed"]["embedding"][batch["tokens"]]
    for w in p["w"]:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    with jax.named_scope("logits"):
        logits = x @ p["embed"]["embedding"].T
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["labels"]].mean()


@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("data_parallel", 4)])
def test_so_does_what_is_computed_again(plan: str, devices: int) -> None:
    """Where there are collectives, behind which XLA puts it off: the first fence waits for it, no other one does."""
    items = flat_of(checkpointed, plan, devices, 8 * WORDS).items
    waiting = [v.aval.shape == (WORDS, HIDDEN) for i in fences(items) for v in items[i].outvars]
    first = [v.aval.shape == (WORDS, HIDDEN) for v in items[fences(items)[0]].outvars]
    assert len(fences(items)) == LAYERS
    assert sum(waiting) == sum(first) == (devices > 1)


@pytest.mark.parametrize(("units", "waits"), [(16, False), (4 * 4096, True)])
def test_the_loop_waits_where_the_peak_would_grow(units: int, waits: bool) -> None:
    """Logits of 64 MiB beside layers that need little are not the peak, which is at the loss."""
    step = jscaler.parallelize("data_parallel", devices=2, donate_argnums=0)(step_of(wide))
    flat = step.lower(*shapes(2 * 4096, 4096, 8, units)).plan.flat
    products = [v.aval.shape == (4096, 8) for item in fences_of(flat.items) for v in item.outvars]
    assert any(products) == waits


@pytest.mark.parametrize("rows", [4, 8])
def test_a_gradient_that_frees_nothing_may_wait(rows: int) -> None:
    assert not fences(flat_of(head, "data_parallel", 4, rows).items)


@pytest.mark.parametrize("loss", [tied, checkpointed])
@pytest.mark.parametrize(("plan", "devices"), of_the_day([("data_parallel", 4), ("vocab_parallel", 4), ("zero3", 4)], 3))
def test_numbers_are_those_of_one_device(plan: str, devices: int, loss: Callable[..., jax.Array]) -> None:
    args = params(), data(4 * WORDS)
    run = jscaler.parallelize(plan, devices=devices)(step_of(loss))
    jscaler.verify(run.lower(*args))
    (ours, value), (whole, expected) = run(*args), jax.jit(step_of(loss))(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, whole)


@pytest.mark.aot
def test_xla_does_not_put_the_gradient_off_until_after_the_loop() -> None:
    """Without the fence it does, and the cotangents of all logits lie in memory while the loop runs."""
    devices = described_devices(find_cluster("8xH100-80GB"))
    run = jscaler.parallelize("vocab_parallel", devices=devices, donate_argnums=0)(step_of(wide))
    text = run.lower(*shapes(4096, 1 << 16, 64, 1 << 16)).lowered.compile(WITHOUT_GPU).as_text()
    lines = text[text.index("\nENTRY") :].splitlines()
    (product,) = [i for i, line in enumerate(lines) if "= (f32[8192,64]" in line and "custom-call(" in line]
    assert product < max(i for i, line in enumerate(lines) if " while(" in line)
