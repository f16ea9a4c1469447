"""What a handle shows as a factor that can be split, lowering can split: every op of small models, and of hard cases."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from of_the_day import of_the_day
from plans.plan_steps import mlp

import jscaler
from jscaler import Split, SplitError
from jscaler.stages import Captured, lower, transform
from models.convnet import ConvConfig, ConvNet
from models.gpt import GPT, GPTConfig
from models.moe import MoE, MoEConfig
from models.training import balanced_train_step, image_train_step, make_image_state, make_state, train_step

TX = optax.sgd(0.1, momentum=0.9)
SIZES: dict[str, Any] = {"hidden": 8, "layers": 1, "heads": 2, "sequence": 8, "vocabulary": 16}


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def text(step: Any, model: Any) -> Any:
    tokens = struct(4, 8, dtype=jnp.int32)
    return step, (jax.eval_shape(lambda: make_state(model, 8, TX)), {"tokens": tokens, "labels": tokens})


def convnet() -> Any:
    model = ConvNet(ConvConfig(hidden=4, layers=2, image=8, classes=4))
    state = jax.eval_shape(lambda: make_image_state(model, (8, 8, 3), TX))
    return image_train_step, (state, {"images": struct(4, 8, 8, 3), "labels": struct(4, dtype=jnp.int32)})


def descent(loss: Callable[..., jax.Array], *arguments: Any) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        found, grads = jscaler.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), found

    return step, arguments


def dealt_out() -> Any:
    """Experts with places for few tokens: one op routes and deals out, and its gradient reads no token."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)  # t k
        taken = jax.nn.one_hot(chosen, 4)  # t k e
        place = (jnp.cumsum(taken, 0) - taken).astype(int)
        held = jax.nn.one_hot(place, 4) * taken[..., None]  # t k e c
        sent = jnp.einsum("td,tec->ecd", x, held.sum(1))
        made = jnp.einsum("ecd,edf->ecf", sent, params["up"])
        return jnp.mean(jnp.einsum("tec,ecf->tf", (held * weights[..., None, None]).sum(1), made) ** 2)

    return descent(loss, {"router": struct(8, 4), "up": struct(4, 8, 8)}, struct(16, 8))


@jax.custom_vjp
def of_sums(x: jax.Array, w: jax.Array) -> jax.Array:  # a b c, c d -> a d
    return x.sum(1) @ w


of_sums.defvjp(lambda x, w: (of_sums(x, w), (x.sum(1), w)), lambda saved, g: (None, saved[0].T @ g))


def saved() -> Any:
    """What a forward saves for its backward has lost a dim."""
    return descent(lambda w, x: jnp.mean(of_sums(x, w) ** 2), struct(8, 8), struct(4, 8, 8))


MADE: dict[str, Callable[[], Any]] = {
    "mlp": mlp,
    "gpt": lambda: text(train_step, GPT(GPTConfig(**SIZES))),
    "moe": lambda: text(balanced_train_step, MoE(MoEConfig(**SIZES, experts=4))),
    "convnet": convnet,
    "dealt out": dealt_out,
    "saved": saved,
}
RARE = ("dealt out", "saved")


@functools.cache
def captured(name: str) -> Captured:
    step, arguments = MADE[name]()
    return jscaler.parallelize("single", devices=1)(step).lower(*arguments).captured


def split(known: Captured, path: str, factor: str) -> None:
    def policy(graph: Any, devices: Any) -> None:
        graph.op_assign(graph.op_trans(path, Split(factor, 2)), devices)

    lower(known, transform(known, policy, 2))


def shown(known: Captured) -> Iterator[tuple[str, str]]:
    for op in known.graph.ops:
        factors = known.graph.rule(op).factors.values()
        yield from ((op.path, f.name) for f in factors if f.splittable and f.size % 2 == 0)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore::jscaler.PlanWarning")  # of what else is copied
def test_every_shown_factor_of_every_op_is_lowered(name: str) -> None:
    known = captured(name)
    cases = list(shown(known))
    assert {path.endswith("@backward") for path, _ in cases} == {True, False}
    for path, factor in cases if name in RARE else of_the_day(cases, 12):
        split(known, path, factor)


@pytest.mark.parametrize("name", RARE)
def test_a_factor_that_no_gradient_reads_says_so(name: str) -> None:
    graph = captured(name).graph
    factors = [(op.path, f) for op in graph.ops for f in graph.rule(op).factors.values()]
    lost = [(path, f.name) for path, f in factors if "gradients read nothing" in f.reason]
    assert lost
    for path, factor in lost:
        assert graph.rule(graph[path.removesuffix("@backward")]).factors[factor].splittable
        with pytest.raises(SplitError, match="the gradients read nothing that it is an index of"):
            split(captured(name), path, factor)
