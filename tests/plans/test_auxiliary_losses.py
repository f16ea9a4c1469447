"""What leaves an op that runs on each micro-batch alone: auxiliary losses, as means over the parts; or a refusal."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from of_the_day import of_the_day
from step_numbers import assert_trees_close
from test_per_microbatch import PARTS, norm_step

import jscaler
from jscaler import plans
from jscaler.errors import PlanError, PlanWarning


def balance(x: jax.Array) -> Any:
    """The load of experts, as a mixture balances it: a product of means."""
    gates = jax.nn.softmax(x)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4, dtype=x.dtype)
    return x * gates, 4 * jnp.sum(chosen.mean(0) * gates.mean(0))


def centred(x: jax.Array) -> Any:
    """A mean over rows that the statistics have centred."""
    y = x - x.mean(0)
    return y, jnp.mean(y**4)


def added(x: jax.Array) -> Any:
    y = x / x.std(0)
    return y, jnp.sum(y**3)


def importance(x: jax.Array) -> Any:
    """Its gradient is one for all rows."""
    return x, jnp.sum(x.mean(0) ** 2)


def root(x: jax.Array) -> Any:
    """Its last op reads no row, and is not linear: the mean of roots is no root of a mean."""
    return x, jnp.sqrt(jnp.sum(x.mean(0) ** 2))


def variation(x: jax.Array) -> Any:
    """The importance of experts, as sparsely gated mixtures balance it: means of rows that nothing but such ops read."""
    gates = jax.nn.softmax(x)
    importance = gates.mean(0)
    return x * gates, importance.var() / importance.mean() ** 2 + importance.max()


class Balanced(nn.Module):
    """Layers whose auxiliary losses add up: sown, or in the carry of a scan."""

    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.how == "loop":
            first, a = BalancedLayer()((x, jnp.zeros((), x.dtype)))[0]
            return BalancedLayer()((first, a))[0]
        kind: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        if self.how == "carried":
            return nn.scan(BalancedLayer, **kind)()((x, jnp.zeros((), x.dtype)), None)[0]
        (y, _), losses = nn.scan(BalancedLayer, **kind)(apart=True)((x, jnp.zeros((), x.dtype)), None)
        return y, losses.sum()


class BalancedLayer(nn.Module):
    apart: bool = False

    @nn.compact
    def __call__(self, held: Any, _: None = None) -> tuple[Any, Any]:
        x, before = held
        y = nn.Dense(4, dtype=x.dtype, param_dtype=x.dtype)(x)
        with jax.named_scope("router"):
            y, loss = balance(y)
        return (y, before if self.apart else before + loss), loss


def with_loss(body: Callable[..., Any]) -> Any:
    """A step on the rows and what leaves beside them."""

    def step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss_fn(w: Any, x: Any) -> Any:
            y, loss = body(w, x)
            return jnp.mean(y**2) + 0.1 * loss**2 + 0.3 * loss, loss

        return value_and_grad(loss_fn, has_aux=True)(state, batch["x"])

    return step


@losing
@pytest.mark.parametrize(
    "body", of_the_day([balance, centred, added, importance, root, variation]), ids=lambda f: f.__name__
)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_leaves_for_good_is_the_mean_over_the_parts(body: Callable[..., Any], devices: int) -> None:
    """An auxiliary loss is read, not linearly, where all parts are joined; its gradient reaches every part."""

    def scoped(w: Any, x: Any) -> Any:
        y = x @ w
        with jax.named_scope("model"), jax.named_scope("norm"):
            return body(y)

    def by_hand(w: Any, x: Any) -> Any:
        """The loss reads the mean of what the parts leave."""
        blocks = x.reshape(devices, PARTS, -1, 4)
        ys, losses = zip(*(scoped(w, blocks[:, i].reshape(-1, 4)) for i in range(PARTS)), strict=True)
        loss = sum(losses) / PARTS if body is not added else sum(losses)
        return sum(jnp.mean(y**2) for y in ys) / PARTS + 0.1 * loss**2 + 0.3 * loss, loss

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        w, x = jnp.asarray(draws.normal(size=(4, 4))), jnp.asarray(draws.normal(size=(8, 4)))
        inner = plans.data_parallel() if devices > 1 else None
        plan = plans.accumulate(PARTS, inner, per_microbatch="norm")
        lowered = jscaler.parallelize(plan, devices=devices)(with_loss(scoped)).lower(w, {"x": x})
        jscaler.verify(lowered)
        got = lowered.compile()(w, {"x": x})
        assert_trees_close(got, jax.value_and_grad(by_hand, has_aux=True)(w, x))


@losing
@pytest.mark.parametrize("where", ["in the module", "outside", "behind layers"])
def test_a_count_behind_the_op_is_a_part_s(where: str) -> None:
    """What is no sum, made of a sum and divided by how many rows that has: in an op of its own, a part's count."""

    def loss_of(w: Any, x: Any, rows: int) -> Any:
        def one(total: Any, w: Any) -> Any:
            y = x @ w
            with jax.named_scope("model"), jax.named_scope("norm"):
                found = jnp.sum(jnp.exp(y).mean(0) * y.sum(0))
                found = found / rows if where == "in the module" else found
            return total + found, None

        if where == "behind layers":
            found = jax.lax.scan(one, jnp.zeros(()), jnp.stack([w, w / 2]))[0]
        else:
            found = one(jnp.zeros(()), w)[0]
        return found if where == "in the module" else found / rows

    def step(state: Any, batch: Any) -> Any:
        return jscaler.value_and_grad(lambda w: loss_of(w, batch["x"], 8) + jnp.mean((batch["x"] @ w) ** 2))(state)

    def by_hand(w: Any, x: Any) -> Any:
        return sum(loss_of(w, rows, 8 // PARTS) for rows in jnp.split(x, PARTS)) / PARTS + jnp.mean((x @ w) ** 2)

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        w, x = jnp.asarray(draws.normal(size=(4, 4))), jnp.asarray(draws.normal(size=(8, 4)))
        lowered = jscaler.parallelize(plans.accumulate(PARTS, per_microbatch="norm"), devices=1)(step).lower(w, {"x": x})
        assert_trees_close(lowered.compile()(w, {"x": x}), jax.value_and_grad(by_hand)(w, x))


@pytest.mark.one_day_in(2)
@losing
@pytest.mark.parametrize("how", of_the_day(["loop", "carried", "stacked"], 2))
def test_auxiliary_losses_of_layers(how: str) -> None:
    with jax.enable_x64(True):
        model, x = Balanced(how), jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
        params = jax.jit(model.init)(jax.random.key(0), x)
        plan = plans.accumulate(PARTS, per_microbatch="router")
        lowered = jscaler.parallelize(plan, devices=1)(with_loss(model.apply)).lower(params, {"x": x})
        got = lowered.compile()(params, {"x": x})

        def by_hand(params: Any, x: Any) -> Any:
            ys, losses = zip(*(model.apply(params, rows) for rows in x.reshape(PARTS, 4, 4)), strict=True)
            loss = sum(losses) / PARTS
            return sum(jnp.mean(y**2) for y in ys) / PARTS + 0.1 * loss**2 + 0.3 * loss, loss

        assert_trees_close(got, jax.value_and_grad(by_hand, has_aux=True)(params, x))


@losing
def test_an_op_of_inputs_alone_stays_in_the_loop() -> None:
    """What only counts inputs runs before, on all; not what each micro-batch has for itself, by which a loss is divided."""

    def loss_of(w: Any, x: Any) -> Any:
        with jax.named_scope("model"), jax.named_scope("norm"):
            scale = jnp.sum(x.mean(0) ** 2 * jax.nn.sigmoid(x).mean(0))
        return jnp.sum((x @ w) ** 2), scale

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            loss, scale = loss_of(w, batch["x"])
            return loss / (1 + scale), scale

        return jscaler.value_and_grad(loss_fn, has_aux=True)(state)

    def by_hand(w: Any, x: Any) -> Any:
        losses, scales = zip(*(loss_of(w, rows) for rows in x.reshape(PARTS, 4, 4)), strict=True)
        return sum(losses) / (1 + sum(scales) / PARTS), sum(scales) / PARTS

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        w, x = jnp.asarray(draws.normal(size=(4, 4))), jnp.asarray(draws.normal(size=(8, 4)))
        lowered = jscaler.parallelize(plans.accumulate(PARTS, per_microbatch="norm"), devices=1)(step).lower(w, {"x": x})
        got = lowered.compile()(w, {"x": x})
        assert_trees_close(got, jax.value_and_grad(by_hand, has_aux=True)(w, x))


def statistics_elsewhere(x: jax.Array) -> Any:
    """Statistics that rows read in an op of their own."""
    spread = x.std(0)
    with jax.named_scope("apply"):
        return x * jax.nn.sigmoid(x @ jnp.eye(4)) / spread, ()


def gate(x: jax.Array) -> Any:
    spread = jnp.tanh(x.std(0))
    with jax.named_scope("apply"):
        return (x @ jnp.eye(4)) * spread, ()


@pytest.mark.parametrize("body", [statistics_elsewhere, gate], ids=lambda f: f.__name__)
def test_what_rows_read_elsewhere_is_no_mean(body: Callable[..., Any]) -> None:
    step = jscaler.parallelize(plans.accumulate(PARTS, per_microbatch="norm/[!a]*"), devices=1)(norm_step(body))
    with pytest.raises(PlanError, match="which each micro-batch has for itself"):
        step.lower(jnp.ones((4, 4)), {"x": jnp.ones((8, 4))})


@pytest.mark.parametrize("how", ["from layers to layers", "in a carry", "a temperature", "made outside"])
def test_what_is_read_on_is_refused(how: str) -> None:
    """Nor is it taken for a mean, or for state, if layers read it on, or if state is made of it outside."""

    def layers(ws: jax.Array, x: jax.Array) -> Any:
        def statistics(total: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            with jax.named_scope("model"), jax.named_scope("norm"):
                spread = (y * total).std(0)
                total = spread.sum() if how == "in a carry" else total
            return total, spread

        total, spreads = jax.lax.scan(statistics, jnp.ones(()), ws)
        if how == "in a carry":
            return x.sum() * total

        def apply(y: jax.Array, wide: Any) -> Any:
            w, spread = wide
            y = y @ w
            with jax.named_scope("model"), jax.named_scope("norm"):
                return (y - y.mean(0)) / spread, None

        return jnp.sum(jax.lax.scan(apply, x, (ws, spreads))[0] ** 3)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            x = batch["x"] @ w[0]
            if how in ("from layers to layers", "in a carry"):
                return layers(w, x), state["t"]
            with jax.named_scope("model"), jax.named_scope("norm"):
                found = jnp.sum(x.std(0)) * state["t"]
            return jnp.sum(x**2), state["t"] + 0.5 * found if how == "a temperature" else found * 1.0 + x.sum() * 0

        (_, t), grads = jscaler.value_and_grad(loss_fn, has_aux=True)(state["w"])
        return {"w": state["w"] - grads, "t": t}

    args = {"w": jnp.ones((2, 4, 4)), "t": jnp.ones(())}, {"x": jnp.ones((8, 4))}
    with pytest.raises(PlanError, match="which each micro-batch has for itself"):
        jscaler.parallelize(plans.accumulate(PARTS, per_microbatch="norm"), devices=1)(step).lower(*args)


@pytest.mark.parametrize("given", ["", ", per_microbatch='norm'"])
def test_the_proposed_selection_holds_what_was_given(given: str) -> None:
    """A count that stands in another scope is made alone, too."""

    def step(w: jax.Array, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            with jax.named_scope("count"):
                count = batch["mask"].sum()
            with jax.named_scope("norm"):
                h = batch["x"] @ w
                h -= (h * batch["mask"][:, None]).sum(0) / count
            return jnp.mean((h @ w) ** 4)

        return value_and_grad(loss_of)(w)

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        batch = {"x": jnp.asarray(draws.normal(size=(8, 4))), "mask": jnp.asarray(draws.uniform(size=8) > 0.3, float)}
        w = jnp.asarray(draws.normal(size=(4, 4)))
        remedy = r"; per_microbatch=\['norm', 'count'\] does it"
        with pytest.raises(PlanError, match=remedy) if given else pytest.warns(PlanWarning, match=remedy):
            jscaler.parallelize(f"accumulate(2{given})", devices=1)(step).lower(w, batch)
        got = jscaler.parallelize("accumulate(2, per_microbatch=['norm', 'count'])", devices=1)(step)(w, batch)
        halves = [step(w, jax.tree.map(lambda a, i=i: a[i : i + 4], batch), jax.value_and_grad) for i in (0, 4)]
        assert_trees_close(got, jax.tree.map(lambda a, b: (a + b) / 2, *halves))


def apart(params: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Layers whose balancing losses are made in a scope apart, of means that the routers return."""

    def loss_of(params: Any) -> jax.Array:
        x, penalty = batch["x"], jnp.zeros(())
        for i in range(2):
            with jax.named_scope(f"router_{i}"):
                gates = jax.nn.softmax(x @ params["router"])
                load, share = jax.nn.one_hot(jnp.argmax(gates, -1), 4).mean(0), gates.mean(0)
            with jax.named_scope(f"experts_{i}"):
                x = jnp.einsum("be,edf,bd->bf", gates, params["experts"], x)
            with jax.named_scope(f"aux_{i}"):
                penalty += 4 * jnp.sum(load * share)
        return jnp.mean(x**2) + 0.1 * penalty

    loss, grads = value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("plan", "devices"), [("accumulate(4{})", 1), ("pipeline(2, 4{})", 2)])
def test_a_loss_in_a_scope_apart_is_made_alone_with_what_it_reads(plan: str, devices: int) -> None:
    """What the message proposes is what works."""
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        params = {"router": jnp.asarray(draws.normal(size=(4, 4))), "experts": jnp.asarray(draws.normal(size=(4, 4, 4)))}
        batch = {"x": jnp.asarray(draws.normal(size=(16, 4)))}
        step = functools.partial(jscaler.parallelize, devices=devices)
        with pytest.raises(PlanError, match=r"'aux_\d+/\S+' \(at .* needs 'router_.*, which 'router_\S+' makes") as refused:
            step(plan.format(""), strict=True)(apart).lower(params, batch)
        (said,) = re.findall(r"; (per_microbatch='aux_\*') does it", str(refused.value))
        got = step(plan.format(f", {said}"))(apart)(params, batch)
        parts = [apart(params, {"x": x}, jax.value_and_grad) for x in batch["x"].reshape(4, 4, 4)]
        assert_trees_close(got, jax.tree.map(lambda *own: sum(own) / 4, *parts))
