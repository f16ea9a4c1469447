"""Random small programs and random plans for them: what the property tests and ``bench.programs`` draw from.

A program is a list of steps, each a function of a tensor (and perhaps of fresh parameters) to a tensor; its loss is the
mean square of what is left. A plan splits ops at random: any splittable factors, nested in any order, on the devices
in any order; ops that it leaves out are filled in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.errors import PlanError, divisors
from tests.policies import draw_counts_policy, draw_groups_policy, draw_loops_policy, draw_policy, draw_timed_policy

Array = Any
StepFn = Callable[[dict[str, Array], Array], Array]
LEARNING_RATE = 0.1


@dataclass
class Program:
    """A loss over parameters and a batch, drawn at random.

    Attributes:
        steps: the kinds of step, in order, for messages and counts.
        params, batch: float64 values.
        bounded: whether no element of a parameter moves by more than the learning rate, so that no net's training explodes:
            behind it rounding alone would move a gradient by percents, on one device too.
    """

    steps: list[str]
    params: dict[str, Array]
    batch: dict[str, Array]
    body: list[StepFn] = field(repr=False)
    bounded: bool = False

    def loss(self, params: dict[str, Array], batch: dict[str, Array]) -> Array:
        env = {**params, **batch}
        x = batch["x"]
        for i, (name, step) in enumerate(zip(self.steps, self.body, strict=True)):
            with jax.named_scope(f"{name}_{i}"):
                x = step(env, x)
        return jnp.mean(x * x)

    def train_step(self, params: dict[str, Array], batch: dict[str, Array]) -> Any:
        """One step of gradient descent; returns parameters, loss and gradients."""
        loss, grads = jscaler.value_and_grad(self.loss)(params, batch)
        return jax.tree.map(self._updated, params, grads), loss, grads

    def _updated(self, param: Array, grad: Array) -> Array:
        most = jnp.maximum(1.0, jnp.max(jnp.abs(grad))) if self.bounded else 1.0
        return param - LEARNING_RATE * grad / most


class Drawer:
    """Draws steps; holds the parameters and inputs that they ask for."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.params: dict[str, Array] = {}
        self.batch: dict[str, Array] = {}

    def param(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = self.rng.normal(size=shape) / math.sqrt(shape[0])
        return name

    def ids(self, shape: tuple[int, ...], limit: int) -> str:
        name = f"ids{len(self.batch)}"
        self.batch[name] = self.rng.integers(0, limit, shape)
        return name

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def axis(self, x: Array) -> int:
        return int(self.rng.integers(x.ndim))


# Each maker looks at the shape at hand and returns a step, or None where it does not apply.
Maker = Callable[[Drawer, Any], StepFn | None]


def dot(d: Drawer, x: Any) -> StepFn:
    w = d.param(x.shape[-1], d.pick(4, 6, 8))
    return lambda env, v: v @ env[w]


def attend(d: Drawer, x: Any) -> StepFn | None:
    if x.ndim != 3:
        return None
    w = d.param(x.shape[-1], x.shape[-1])
    return lambda env, v: jnp.einsum("bst,btd->bsd", jax.nn.softmax(jnp.einsum("bsd,btd->bst", v @ env[w], v)), v)


def elementwise(d: Drawer, x: Any) -> StepFn:
    fun = d.pick(
        jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, jnp.cosh, lambda v: jnp.where(v > 0, v, v / 2)
    )
    return lambda env, v: fun(v)


def bias(d: Drawer, x: Any) -> StepFn:
    b = d.param(x.shape[-1])
    return d.pick(lambda env, v: v + env[b], lambda env, v: v * env[b], lambda env, v: jnp.maximum(v, env[b]))


def reduction(d: Drawer, x: Any) -> StepFn:
    axis, fun = d.axis(x), d.pick(jnp.sum, jnp.mean, jnp.max, jax.nn.logsumexp)
    if x.ndim > 2 and d.pick(True, False):
        return lambda env, v: fun(v, axis=axis)
    return lambda env, v: v - fun(v, axis=axis, keepdims=True)


def normalise(d: Drawer, x: Any) -> StepFn:
    axis = d.axis(x)

    def norm(env: Any, v: Array) -> Array:
        centred = v - v.mean(axis, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-2)

    return d.pick(norm, lambda env, v: jax.nn.softmax(v, axis=axis) * 3, lambda env, v: jax.nn.log_softmax(v, axis=axis))


def reshape(d: Drawer, x: Any) -> StepFn | None:
    if x.ndim == 3 and d.pick(True, False):
        a, b, c = x.shape
        shape = d.pick((a * b, c), (a, b * c))
    else:
        axis = d.axis(x)
        inner = d.pick(*divisors(x.shape[axis]))
        if x.ndim > 3 or inner in (1, x.shape[axis]):
            return None
        shape = (*x.shape[:axis], x.shape[axis] // inner, inner, *x.shape[axis + 1 :])
    return lambda env, v: v.reshape(shape)


def transpose(d: Drawer, x: Any) -> StepFn:
    order = tuple(int(i) for i in d.rng.permutation(x.ndim))
    return lambda env, v: v.transpose(order)


def look_up(d: Drawer, x: Any) -> StepFn:
    table, ids = d.param(8, x.shape[-1]), d.ids(x.shape[:-1], 8)
    return d.pick(
        lambda env, v: v + env[table][env[ids]],
        lambda env, v: v + jnp.take(env[table], env[ids], axis=0, mode="clip"),
    )


def pick_along(d: Drawer, x: Any) -> StepFn | None:
    axis = d.axis(x)
    ids = d.ids((*x.shape[:axis], 2, *x.shape[axis + 1 :]), x.shape[axis])
    return lambda env, v: jnp.take_along_axis(v, env[ids], axis=axis)


def scatter(d: Drawer, x: Any) -> StepFn:
    ids = d.ids(x.shape[:1], 4)
    return d.pick(
        lambda env, v: jax.ops.segment_sum(v, env[ids], num_segments=4),
        lambda env, v: jnp.ones((4, *v.shape[1:])).at[env[ids]].add(v),
        lambda env, v: v.at[env[ids] % v.shape[0]].multiply(1.5, mode="drop") if v.shape[0] > 1 else v,
    )


def convolve(d: Drawer, x: Any) -> StepFn | None:
    if x.ndim != 3:
        return None
    width, stride = d.pick(1, 2, 3), d.pick(1, 2)
    kernel = d.param(width, x.shape[-1], 4)
    padding = d.pick("SAME", "VALID") if width == stride else "SAME"

    def conv(env: Any, v: Array) -> Array:
        return jax.lax.conv_general_dilated(v, env[kernel], (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC"))

    return conv


def pool(d: Drawer, x: Any) -> StepFn | None:
    if x.ndim != 3:
        return None
    import flax.linen as nn

    fun, window, stride = d.pick(nn.max_pool, nn.avg_pool), d.pick(2, 3), d.pick(1, 2)
    return lambda env, v: fun(v, (window,), (stride,), "SAME")


def along(d: Drawer, x: Any) -> StepFn:
    axis = d.axis(x)
    fun = d.pick(
        lambda v: jnp.cumsum(v, axis), lambda v: jnp.sort(v, axis), lambda v: jnp.flip(v, axis),
        lambda v: jnp.roll(v, 1, axis), lambda v: jnp.concatenate([v, jnp.sin(v)], axis),
        lambda v: jax.lax.cummax(v, axis), lambda v: jnp.stack([v, v * 2], axis).sum(axis),
    )  # fmt: skip
    return lambda env, v: fun(v)


def halves(d: Drawer, x: Any) -> StepFn | None:
    axis = d.axis(x)
    if x.shape[axis] % 2:
        return None

    def rotate(env: Any, v: Array) -> Array:
        a, b = jnp.split(v, 2, axis)
        return jnp.concatenate([-b, a], axis) + v

    def merge(env: Any, v: Array) -> Array:
        even = jax.lax.slice_in_dim(v, 0, None, 2, axis)
        return even * jax.lax.slice_in_dim(v, 1, None, 2, axis)

    return d.pick(rotate, merge, lambda env, v: jax.lax.slice_in_dim(v, 0, v.shape[axis] // 2, 1, axis))


def recur(d: Drawer, x: Any) -> StepFn:
    def run(env: Any, v: Array) -> Array:
        return jax.lax.scan(lambda c, row: (0.5 * c + jnp.tanh(row), c * row), jnp.zeros(v.shape[1:]), v)[1]

    return run


def layers(d: Drawer, x: Any) -> StepFn:
    w = d.param(3, x.shape[-1], x.shape[-1])

    def run(env: Any, v: Array) -> Array:
        return jax.lax.scan(lambda c, k: (jnp.tanh(c @ k) + c, None), v, env[w])[0]

    def again(env: Any, v: Array) -> Array:
        return jax.lax.scan(jax.checkpoint(lambda c, k: (jnp.tanh(c @ k) + c, None)), v, env[w])[0]

    return d.pick(run, again)


def branch(d: Drawer, x: Any) -> StepFn:
    def run(env: Any, v: Array) -> Array:
        return jax.lax.cond(env["x"].sum() > 0, lambda t: jnp.tanh(t) * 2, lambda t: t - 1, v)

    return run


def top(d: Drawer, x: Any) -> StepFn:
    return d.pick(
        lambda env, v: jax.lax.top_k(v, min(2, v.shape[-1]))[0], lambda env, v: v * (v.argmax(-1, keepdims=True) + 1)
    )


def drop(d: Drawer, x: Any) -> StepFn:
    seed = int(d.rng.integers(100))

    def run(env: Any, v: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(env["key"]), seed)
        return jnp.where(jax.random.bernoulli(key, 0.7, v.shape), v / 0.7, 0)

    return run


MAKERS: tuple[Maker, ...] = (
    dot, dot, attend, elementwise, elementwise, bias, reduction, normalise, normalise, reshape, transpose, look_up,
    pick_along, scatter, convolve, pool, along, halves, recur, layers, branch, top, drop,
)  # fmt: skip
HUGE = 4096  # elements; longer programs would only take longer


def draw_program(seed: int, length: int = 6) -> Program:
    """The program of ``seed``."""
    drawer = Drawer(seed)
    rank = drawer.pick(2, 3)
    shape = tuple(drawer.pick(4, 6, 8) for _ in range(rank))
    drawer.batch["x"] = drawer.rng.normal(size=shape)
    drawer.batch["key"] = np.asarray(jax.random.key_data(jax.random.key(seed)))
    names: list[str] = []
    body: list[StepFn] = []
    x = jax.ShapeDtypeStruct(shape, jnp.float64)
    while len(body) < length:
        maker = drawer.pick(*MAKERS)
        step = maker(drawer, x) if x.ndim >= 2 else (bias(drawer, x) if len(body) < length - 1 else elementwise(drawer, x))
        if step is None:
            continue
        env = {**drawer.params, **drawer.batch}
        after = jax.eval_shape(step, env, x)
        if not (0 < math.prod(after.shape) <= HUGE) or after.ndim > 4 or after.ndim < 1:
            continue
        names.append(maker.__name__)
        body.append(step)
        x = after
    if not drawer.params:
        w = drawer.param(x.shape[-1])
        names.append("bias")
        body.append(lambda env, v: v * env[w])
    return Program(names, drawer.params, drawer.batch, body)


@dataclass(frozen=True)
class Outcome:
    """What came of one random program under one random plan.

    Attributes:
        splits: how many ops the plan split.
        worst: the largest difference, in units of what is allowed (1e-10 of the leaf's largest, at least of the rate).
        where: the leaf that it is in.
        refused: why the plan is refused, if it is.
    """

    program: Program
    devices: int
    splits: int
    worst: float
    where: str
    refused: str = ""

    @property
    def steps(self) -> list[str]:
        return self.program.steps


def devices_of(seed: int, timed: bool = False) -> int:
    """The number of devices that a seed runs on; of programs with time axes few, which is where they matter."""
    return ((1, 2, 1, 4) if timed else (2, 4, 8, 6))[seed % 4]


def lowered_case(seed: int, timed: bool = False, counts: bool = False, groups: bool = False) -> tuple[Program, Any]:
    """The program of ``seed``, and its step lowered under the plan of ``seed``."""
    program, devices = draw_program(seed), devices_of(seed, timed)
    drawn = {(False, True): draw_loops_policy, (False, False): draw_groups_policy, (True, True): draw_counts_policy}
    draw = drawn.get((timed, counts), draw_timed_policy) if groups or timed else draw_policy
    policy = draw(seed, devices)
    step = jscaler.parallelize(policy, devices=devices)(program.train_step)
    return program, step.lower(program.params, program.batch)


def measure(seed: int, steps: int = 2, timed: bool = False, counts: bool = False, groups: bool = False) -> Outcome:
    """Run the program of ``seed`` under the plan of ``seed`` and under ``jax.jit``, in float64, for some steps.

    Args:
        timed: whether the plan has time axes.
        counts: whether these have names and counts that need not go together; such a plan may be refused. Of device groups,
            whether a loop spans them.
        groups: whether the plan places ops on several device groups.

    Losses, gradients and parameters are compared; and the program's redistribution is proven.
    """
    try:
        program, lowered = lowered_case(seed, timed, counts, groups)
    except PlanError as error:
        if not (counts or groups):
            raise
        return Outcome(draw_program(seed), devices_of(seed, timed), 0, 0.0, "", str(error))
    return compared(program, lowered, devices_of(seed, timed), steps)


def compared(program: Program, lowered: Any, devices: int, steps: int) -> Outcome:
    """Some steps of ``lowered`` beside those of ``jax.jit``, from the same parameters; its redistribution is proven."""
    if not lowered.plan.proof:
        jscaler.verify(lowered)
    run, plain = lowered.compile(), jax.jit(program.train_step)
    ours, theirs = program.params, program.params
    worst, where = 0.0, ""
    for _ in range(steps):
        mine, true = run(ours, program.batch), plain(theirs, program.batch)
        for (path, a), b in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(true), strict=True):
            off = _difference(np.asarray(a), np.asarray(b))
            if off > worst:
                worst, where = off, jax.tree_util.keystr(path)
        ours, theirs = mine[0], true[0]
    splits = sum(type(d).__name__ == "Trans" for d in lowered.plan.plan.decisions)
    return Outcome(program, devices, splits, worst, where)


def _difference(ours: np.ndarray, true: np.ndarray) -> float:
    if not np.array_equal(np.isnan(ours), np.isnan(true)):
        return math.inf
    allowed = 1e-10 * max(float(np.nanmax(np.abs(true), initial=0.0)), LEARNING_RATE)
    return float(np.nanmax(np.abs(ours - true), initial=0.0)) / allowed
