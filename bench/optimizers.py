"""Every optimizer and wrapper that Optax exports, `optax.contrib` too: one device's numbers, or a sentence of our own?

A row is a transformation on a tiny model under a plan, `STEPS` steps in float64. What is measured is the largest distance
of a leaf of parameters and optimizer state from ``jax.jit``'s; ``refused`` is the class of the error that a user gets, and
``why`` its sentence. A crash is a wrong row. Names come from Optax itself: one that needs arguments which `ARGUMENTS` does
not give is a wrong row, too, so that a new release of Optax is noticed. Names in ``own`` are updates as users write them
by hand, of `bench.own_optimizers`.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import jscaler
from bench.harness import Row, main
from bench.own_optimizers import OWN
from bench.parity_updates import RATE, distances, groups, kernels

COLUMNS = ("optimizer", "model", "plan", "refused", "value", "bound", "why")
STEPS, BATCH = 3, 8
BOUND = 1e-9
PLANS = {"zero3": 4, "tensor_parallel": 4, "megatron(dp=2, tp=2)": 4, "accumulate(2)": 1, "pipeline(2, 2)": 2}
QUICK = ("sgd", "lookahead", "own.clip_by_raveled_norm")
MADE = "GradientTransformation"  # what a signature says of those
UNSAID = ("scale_by_factored_rms", "contrib.dog", "contrib.dowg", "contrib.hutchinson_estimator_diag_hessian")
OTHERS = ("with_extra_args_support", "measure_with_ema")  # make none of their own


def adam() -> optax.GradientTransformation:
    return optax.adam(RATE)


def mean_square(updates: Any) -> jax.Array:
    return sum((jnp.mean(u**2) for u in jax.tree.leaves(updates)), jnp.zeros(()))


def every_other(step: jax.Array, **_: Any) -> jax.Array:
    return step % 2 == 0


def first_two(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


# how to call what needs more than a learning rate
ARGUMENTS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "adafactor": lambda f: f(RATE, min_dim_size_to_factor=8),
    "adaptive_grad_clip": lambda f: f(0.1),
    "add_decayed_weights": lambda f: f(0.1),
    "add_noise": lambda f: f(eta=0.1, gamma=0.5, key=jax.random.key(3)),
    "apply_every": lambda f: f(2),
    "apply_if_finite": lambda f: f(adam(), 3),
    "chain": lambda f: f(optax.clip(0.1), adam()),
    "clip": lambda f: f(0.01),
    "clip_by_block_rms": lambda f: f(0.01),
    "clip_by_global_norm": lambda f: f(0.1),
    "conditionally_mask": lambda f: f(adam(), every_other),
    "conditionally_transform": lambda f: f(adam(), every_other),
    "ema": lambda f: f(0.9),
    "flatten": lambda f: f(adam()),
    "freeze": lambda f: f(kernels),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=optax.linear_schedule(RATE, 0.0, 10)),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=RATE),
    "lookahead": lambda f: f(adam(), 2, 0.5),
    "masked": lambda f: f(adam(), kernels),
    "monitor": lambda f: f({"mean": optax.measure_with_ema(mean_square, 0.9), "now": mean_square}),
    "multi_transform": lambda f: f({"kernel": adam(), "bias": optax.sgd(RATE)}, groups),
    "named_chain": lambda f: f(("clip", optax.clip(0.1)), ("adam", adam())),
    "partition": lambda f: f({"kernel": adam(), "bias": optax.set_to_zero()}, groups),
    "scale": lambda f: f(0.5),
    "scale_by_backtracking_linesearch": lambda f: f(5),
    "scale_by_factored_rms": lambda f: f(min_dim_size_to_factor=8),
    "scale_by_schedule": lambda f: f(optax.linear_schedule(1.0, 0.0, 10)),
    "scale_by_zoom_linesearch": lambda f: f(5),
    "selective_transform": lambda f: f(adam(), freeze_mask=kernels),
    "snapshot": lambda f: f("mean", mean_square),
    "stateless": lambda f: f(lambda updates, params: jax.tree.map(lambda u, p: u + 0.1 * p, updates, params)),
    "stateless_with_tree_map": lambda f: f(lambda update, parameter: update + 0.1 * parameter),
    "trace": lambda f: f(0.9),
    "MultiSteps": lambda f: f(adam(), 2).gradient_transformation(),
    "contrib.differentially_private_aggregate": lambda f: f(1.0, 0.1, 0),
    "contrib.dpsgd": lambda f: f(RATE, 1.0, 0.1, 0),
    "contrib.mechanize": lambda f: f(adam()),
    "contrib.reduce_on_plateau": lambda f: f(patience=1, accumulation_size=2),
    "contrib.sam": lambda f: f(adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
    "contrib.scale_by_muon": lambda f: optax.masked(f(weight_dimension_numbers=first_two), kernels),
    "contrib.schedule_free": lambda f: f(adam(), RATE),
    "contrib.sophia": lambda f: f(RATE, update_interval=2),
    "contrib.split_real_and_imaginary": lambda f: f(adam()),
}
PER_EXAMPLE = {"contrib.differentially_private_aggregate", "contrib.dpsgd"}
SECOND_ORDER = {"contrib.sophia", "contrib.hutchinson_estimator_diag_hessian"}
NOTHING_MORE = {"contrib.sam"}  # whose updates refuse what they do not read
OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"default": "", "metavar": "TEXT", "help": "only names that hold this, or one of these: 'sgd|muon'"},
    "model": {"default": "", "metavar": "TEXT", "help": "mlp or stack"},
    "plan": {"default": "", "metavar": "TEXT", "help": "only plans that hold this"},
}


def exported() -> dict[str, Callable[..., Any]]:
    """All functions of Optax that make a transformation, by the names under which a user finds them."""
    found: dict[str, Callable[..., Any]] = {"MultiSteps": optax.MultiSteps}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        public = {prefix + name: value for name, value in vars(module).items() if not name.startswith("_")}
        for name, function in public.items():
            if not inspect.isfunction(function):
                continue
            said = MADE in str(inspect.signature(function).return_annotation) or name in UNSAID or name in ARGUMENTS
            if said and name not in OTHERS:
                found[name] = function
    return dict(sorted(found.items()))


def made(name: str) -> optax.GradientTransformationExtraArgs:
    """The transformation; one of Optax without a learning rate of its own has a scale behind it."""
    if name in OWN:
        return optax.with_extra_args_support(OWN[name]())
    function = exported()[name]
    has_rate = "learning_rate" in inspect.signature(function).parameters
    call = ARGUMENTS.get(name, lambda f: f(learning_rate=RATE) if has_rate else f())
    found = call(function)
    return optax.with_extra_args_support(found if has_rate else optax.chain(found, optax.scale(-RATE)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gate = self.param("gate", nn.initializers.constant(0.5), (), x.dtype)
        return x + gate * nn.Dense(8)(nn.tanh(nn.Dense(16)(x))), None


class Stack(nn.Module):
    """A table, scanned layers with a scalar in each, and a head."""

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:  # b s -> b 8
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(nn.Embed(16, 8)(words), None)
        return nn.Dense(8, name="head")(x.mean(axis=1))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, name="head")(nn.relu(nn.Dense(16, name="hidden")(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[np.random.Generator], np.ndarray]]] = {
    "mlp": (Mlp, lambda draws: draws.normal(size=(BATCH, 8))),
    "stack": (Stack, lambda draws: draws.integers(0, 16, (BATCH, 4))),
}


def stepped(name: str, model: str, value_and_grad: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A step with all that some optimizer asks for, its state, and a batch."""
    optimizer, (make, draw), draws = made(name), MODELS[model], np.random.default_rng(0)
    module, x = make(), draw(draws)
    batch = {"x": x, "y": draws.integers(0, 8, BATCH)}
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3), shapes)

    def loss(p: Any, batch: Any) -> jax.Array:
        logits = jnp.asarray(module.apply({"params": p}, batch["x"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(state: Any, batch: Any) -> Any:
        fast = state["params"].fast if name == "lookahead" else state["params"]
        if name in PER_EXAMPLE:
            rows = jax.tree.map(lambda x: x[:, None], batch)
            values, gradients = jax.vmap(value_and_grad(loss), in_axes=(None, 0))(fast, rows)
            value = values.mean()
        else:
            value, gradients = value_and_grad(loss)(fast, batch)

        def whole(p: Any) -> jax.Array:
            return loss(p, batch)

        more = {} if name in NOTHING_MORE else {"value": value, "grad": gradients, "value_fn": whole}
        more = {"obj_fn": whole} if name in SECOND_ORDER else more
        updates, moments = optimizer.update(gradients, state["opt"], state["params"], **more)
        return {"params": optax.apply_updates(state["params"], updates), "opt": moments}, value

    held = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params
    return step, {"params": held, "opt": optimizer.init(held)}, batch


def run(step: Callable[..., Any], state: Any, batch: Any) -> Any:
    for _ in range(STEPS):
        state, _ = step(state, batch)
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)


def rows(quick: bool, optimizer: str, model: str, plan: str) -> Iterator[Row]:
    """All cases, or in the quick form a few optimizers, each under one of the plans in turn."""
    names = [n for n in (*exported(), *OWN) if (n in QUICK if quick and not optimizer else True)]
    cases = [(n, m) for m in MODELS if model in m for n in names if any(text in n for text in optimizer.split("|"))]
    plans = [p for p in PLANS if plan in p]
    for i, (name, chosen) in enumerate(cases):
        yield from rows_of(name, chosen, [plans[i % len(plans)]] if quick and not optimizer else plans)
        jax.clear_caches()


def rows_of(name: str, model: str, plans: Sequence[str]) -> Iterator[Row]:
    row = {"optimizer": name, "model": model, "refused": "", "value": 1.0, "bound": 0}
    with jax.enable_x64(True):
        try:
            step, state, batch = stepped(name, model, jax.value_and_grad)
            want = run(jax.jit(step), state, batch)
        except Exception as error:
            yield {**row, "plan": "jax.jit", "why": failure(error)}
            return
        for plan in plans:
            try:
                step, state, batch = stepped(name, model, jscaler.value_and_grad)
                got = run(jscaler.parallelize(plan, devices=PLANS[plan])(step), state, batch)
                far, path = max((far, path) for path, far in distances(got, want).items())
                yield {**row, "plan": plan, "value": far, "bound": BOUND, "why": "" if far <= BOUND else path}
            except jscaler.JscalerError as error:
                yield {**row, "plan": plan, "refused": type(error).__name__, "value": 0, "why": str(error)}
            except Exception as error:
                yield {**row, "plan": plan, "why": failure(error)}


def failure(error: Exception) -> str:
    """What crashed, and where."""
    (place,) = traceback.extract_tb(error.__traceback__)[-1:]
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said} ({os.path.basename(place.filename)}:{place.lineno})"


if __name__ == "__main__":
    main("optimizers", __doc__ or "", COLUMNS, rows, devices=max(PLANS.values()), options=OPTIONS)
