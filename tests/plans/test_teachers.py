"""Nets that no gradient is taken of: moving averages, targets that are copied now and then, frozen teachers and bases."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import losing
from of_the_day import of_the_day

import jscaler

WIDTH, UNITS = 8, 16
DRAWS = np.random.default_rng(0)
By = Callable[[Any], Callable[..., Any]]  # value_and_grad -> a step


def weight(*shape: int) -> np.ndarray:
    return np.asarray(DRAWS.normal(size=shape) / np.sqrt(shape[0]), np.float32)


def mlp(out: int = WIDTH, units: int = UNITS) -> dict[str, np.ndarray]:
    return {"in": weight(WIDTH, units), "out": weight(units, out)}


def run(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["in"]) @ p["out"]


def project(p: Any, x: jax.Array) -> jax.Array:
    return run(p["head"], run(p["encoder"], x))


def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def following(teacher: Any, student: Any) -> Any:
    return jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)


def moved(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


BATCH = {name: weight(8, WIDTH) for name in "abcd"}


def byol() -> tuple[By, tuple[Any, ...]]:
    """A predictor behind the student alone; both ways."""
    net = {"encoder": mlp(), "head": mlp()}

    def step_by(value_and_grad: Any) -> Any:
        def train(state: Any, batch: Any) -> Any:
            def distance(p: Any, one: Any, other: Any) -> jax.Array:
                aim = jax.lax.stop_gradient(project(state["teacher"], other))
                return ((unit(run(p["predictor"], project(p, one))) - unit(aim)) ** 2).sum(-1).mean()

            def loss_of(p: Any) -> jax.Array:
                return distance(p, batch["a"], batch["b"]) + distance(p, batch["b"], batch["a"])

            loss, grads = value_and_grad(loss_of)(state["student"])
            student = moved(state["student"], grads)
            followed = {name: student[name] for name in ("encoder", "head")}
            return {"student": student, "teacher": following(state["teacher"], followed)}, loss

        return train

    return step_by, ({"student": {**net, "predictor": mlp()}, "teacher": jax.tree.map(lambda p: 1.5 * p, net)}, BATCH)


def moco(inside: bool) -> Callable[[], tuple[By, tuple[Any, ...]]]:
    """A queue of keys in the state; keys are made in the loss, or in front of it."""

    def made() -> tuple[By, tuple[Any, ...]]:
        net = {"encoder": mlp(), "head": mlp()}

        def step_by(value_and_grad: Any) -> Any:
            def train(state: Any, batch: Any) -> Any:
                teacher = following(state["teacher"], state["student"])

                def keys() -> jax.Array:
                    return jax.lax.stop_gradient(unit(project(teacher, batch["b"])))

                front = None if inside else keys()

                def loss_of(p: Any) -> Any:
                    own = keys() if front is None else front
                    queries = unit(project(p, batch["a"]))
                    same, others = (queries * own).sum(-1) / 0.2, queries @ state["queue"].T / 0.2
                    return (jnp.logaddexp(same, jax.nn.logsumexp(others, -1)) - same).mean(), own

                (loss, own), grads = value_and_grad(loss_of, has_aux=True)(state["student"])
                queue = jax.lax.dynamic_update_slice(state["queue"], own, (state["at"], 0))
                new = {"student": moved(state["student"], grads), "teacher": teacher}
                return {**new, "queue": queue, "at": (state["at"] + 8) % 32}, loss

            return train

        state = {"student": net, "teacher": jax.tree.map(lambda p: 1.5 * p, net)}
        return step_by, ({**state, "queue": weight(32, WIDTH), "at": np.int32(0)}, BATCH)

    return made


def dino() -> tuple[By, tuple[Any, ...]]:
    """A centre that follows, and more views for the student than for the teacher."""
    net = {"encoder": mlp(), "head": mlp(24)}

    def step_by(value_and_grad: Any) -> Any:
        def train(state: Any, batch: Any) -> Any:
            def loss_of(p: Any) -> Any:
                aims = [project(state["teacher"], batch[view]) for view in "ab"]
                chances = [jax.nn.softmax((jax.lax.stop_gradient(t) - state["centre"]) / 0.4) for t in aims]
                guesses = [jax.nn.log_softmax(project(p, batch[view])) for view in "abcd"]
                pairs = [(q, g) for i, q in enumerate(chances) for j, g in enumerate(guesses) if i != j]
                return sum(-(q * g).sum(-1).mean() for q, g in pairs) / len(pairs), sum(t.mean(0) for t in aims) / 2

            (loss, mean), grads = value_and_grad(loss_of, has_aux=True)(state["student"])
            student = moved(state["student"], grads)
            centre = 0.9 * state["centre"] + 0.1 * mean
            return {"student": student, "teacher": following(state["teacher"], student), "centre": centre}, loss

        return train

    state = {"student": net, "teacher": jax.tree.map(lambda p: 1.5 * p, net), "centre": np.zeros(24, np.float32)}
    return step_by, (state, BATCH)


def data2vec() -> tuple[By, tuple[Any, ...]]:
    """Targets are means over the last layers of a stack."""
    net = {"enter": weight(WIDTH, WIDTH), "layers": jax.tree.map(lambda *x: np.stack(x), *(mlp() for _ in range(3)))}

    def layers_of(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
            x = x + run(own, unit(x))
            return x, x

        return jax.lax.scan(layer, x @ p["enter"], p["layers"])

    def step_by(value_and_grad: Any) -> Any:
        def train(state: Any, batch: Any) -> Any:
            def loss_of(p: Any) -> jax.Array:
                aim = unit(layers_of(state["teacher"], batch["a"])[1][-2:]).mean(0)
                guess, _ = layers_of(p["net"], jnp.where(batch["b"] > 0, batch["a"], 0))
                return ((guess @ p["head"] - jax.lax.stop_gradient(aim)) ** 2).mean()

            loss, grads = value_and_grad(loss_of)(state["student"])
            student = moved(state["student"], grads)
            return {"student": student, "teacher": following(state["teacher"], student["net"])}, loss

        return train

    teacher = jax.tree.map(lambda p: 1.5 * p, net)
    return step_by, ({"student": {"net": net, "head": weight(WIDTH, WIDTH)}, "teacher": teacher}, BATCH)


def chosen(now: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(now, a, b), new, old)


def q_learning(copied: Callable[[Any, Any, Any], Any]) -> Callable[[], tuple[By, tuple[Any, ...]]]:
    """The target is the net of some steps ago; values are made in front of the loss, by the net's own choice."""

    def made() -> tuple[By, tuple[Any, ...]]:
        def step_by(value_and_grad: Any) -> Any:
            def train(state: Any, batch: Any) -> Any:
                best = run(state["net"], batch["after"]).argmax(-1)
                value = jnp.take_along_axis(run(state["target"], batch["after"]), best[:, None], 1)[:, 0]

                def loss_of(p: Any) -> jax.Array:
                    known = jnp.take_along_axis(run(p, batch["before"]), batch["action"][:, None], 1)[:, 0]
                    return ((known - jax.lax.stop_gradient(batch["reward"] + 0.9 * value)) ** 2).mean()

                loss, grads = value_and_grad(loss_of)(state["net"])
                net, step = moved(state["net"], grads), state["step"] + 1
                return {"net": net, "target": copied(step % 2 == 0, net, state["target"]), "step": step}, loss

            return train

        views = {"before": weight(8, WIDTH), "after": weight(8, WIDTH), "reward": weight(8)}
        state = {"net": mlp(4), "target": mlp(4), "step": np.int32(0)}
        return step_by, (state, {**views, "action": np.arange(8, dtype=np.int32) % 4})

    return made


def distilled(inside: bool, stored: bool) -> Callable[[], tuple[By, tuple[Any, ...]]]:
    """A frozen teacher of another width, in the state or an argument; it runs in the loss, or in front of it."""

    def made() -> tuple[By, tuple[Any, ...]]:
        teacher = {"encoder": mlp(units=4 * UNITS), "head": mlp(12, 4 * UNITS)}

        def step_by(value_and_grad: Any) -> Any:
            def train(state: Any, batch: Any, *given: Any) -> Any:
                frozen = state["teacher"] if stored else given[0]
                front = None if inside else project(frozen, batch["a"])

                def loss_of(p: Any) -> jax.Array:
                    logits = project(frozen, batch["a"]) if front is None else front
                    chances = jax.nn.softmax(jax.lax.stop_gradient(logits) / 2)
                    return -(chances * jax.nn.log_softmax(project(p, batch["a"]) / 2)).sum(-1).mean()

                loss, grads = value_and_grad(loss_of)(state["student"])
                return {**state, "student": moved(state["student"], grads)}, loss

            return train

        state = {"student": {"encoder": mlp(), "head": mlp(12)}}
        return step_by, ({**state, "teacher": teacher}, BATCH) if stored else (state, BATCH, teacher)

    return made


def lora(stored: bool) -> Callable[[], tuple[By, tuple[Any, ...]]]:
    """Adapters of low rank beside frozen kernels."""

    def made() -> tuple[By, tuple[Any, ...]]:
        base = mlp()
        adapters = {
            name: {"a": weight(kernel.shape[0], 2), "b": weight(2, kernel.shape[1])} for name, kernel in base.items()
        }

        def step_by(value_and_grad: Any) -> Any:
            def train(state: Any, batch: Any, *given: Any) -> Any:
                frozen = state["base"] if stored else given[0]

                def loss_of(p: Any) -> jax.Array:
                    def times(x: jax.Array, name: str) -> jax.Array:
                        return x @ frozen[name] + x @ p[name]["a"] @ p[name]["b"]

                    return ((times(jnp.tanh(times(batch["a"], "in")), "out") - batch["b"]) ** 2).mean()

                loss, grads = value_and_grad(loss_of)(state["adapters"])
                return {**state, "adapters": moved(state["adapters"], grads)}, loss

            return train

        return step_by, ({"base": base, "adapters": adapters}, BATCH) if stored else ({"adapters": adapters}, BATCH, base)

    return made


STEPS: dict[str, Callable[[], tuple[By, tuple[Any, ...]]]] = {
    "byol": byol,
    "moco": moco(inside=True),
    "moco, keys in front": moco(inside=False),
    "dino": dino,
    "data2vec": data2vec,
    "q-learning, where": q_learning(chosen),
    "q-learning, cond": q_learning(lambda now, new, old: jax.lax.cond(now, lambda: new, lambda: old)),
    "q-learning, optax": q_learning(lambda now, new, old: optax.periodic_update(new, old, jnp.int32(now) + 1, 2)),
    "distilled": distilled(inside=True, stored=False),
    "distilled in front": distilled(inside=False, stored=False),
    "distilled, stored": distilled(inside=True, stored=True),
    "distilled in front, stored": distilled(inside=False, stored=True),
    "lora": lora(stored=False),
    "lora, stored": lora(stored=True),
}
PLANS = {"tensor_parallel": 2, "megatron(dp=2, tp=2)": 4, "co_shard(2)": 1, "zero3": 4, "data_parallel": 4}


@losing
@pytest.mark.parametrize(("name", "plan"), of_the_day([(name, plan) for name in STEPS for plan in PLANS], 10))
def test_the_numbers_are_those_of_one_device(name: str, plan: str) -> None:
    step_by, (state, *rest) = STEPS[name]()
    step, one = jscaler.parallelize(plan, devices=PLANS[plan])(step_by(jscaler.value_and_grad)), step_by(jax.value_and_grad)
    one, got, want = jax.jit(one), state, state
    for _ in range(3):
        (got, loss), (want, expected) = step(got, *rest), one(want, *rest)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


@pytest.mark.parametrize("name", of_the_day([n for n in STEPS if "lora" not in n], 4, ["distilled in front", "moco"]))
def test_no_product_of_a_teacher_is_copied(name: str) -> None:
    step_by, arguments = STEPS[name]()
    plan = jscaler.parallelize("tensor_parallel", devices=2)(step_by(jscaler.value_and_grad)).lower(*arguments).plan
    assert not plan.lost.ops
    kernels = [t for t in plan.graph.inputs if t.name.endswith(("/in", "/out"))]
    whole = [t.name for t in kernels if plan.completed.inputs[t].local_shape == t.shape]
    assert not whole
