"""Random models that need a whole batch, run on each micro-batch alone, against the same step traced on the part.

A model is a list of layers: products, and in scopes called ``stat_…`` statistics of rows (as norms have them, in many
spellings), auxiliary losses, masks and their counts, and running state that is updated, and perhaps read, by rows; some
of it in a ``lax.scan`` over layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler import plans
from jscaler.errors import PlanError

Array = Any
ROWS, WIDTH, RATE, EPS = 8, 4, 0.1, 1e-2
# rows and state -> rows, the next state, and a loss beside the rows'
LayerFn = Callable[[dict[str, Array], dict[str, Array], Array, Array], tuple[Array, dict[str, Array], Array]]
Statistic = Callable[[Array, Array], Array]


@dataclass
class Model:
    """A model drawn at random.

    Attributes:
        layers: their kinds.
        drawn: what each is made of, for messages.
        params, state, batch: float64 values.
        parts, devices: how many micro-batches, and of how many devices each has a piece of the batch.
    """

    layers: list[str]
    params: dict[str, Array]
    state: dict[str, Array]
    batch: dict[str, Array]
    parts: int
    devices: int
    body: list[LayerFn] = field(repr=False)
    drawn: list[str] = field(default_factory=list)

    def loss(self, params: Any, state: Any, batch: Any) -> Any:
        x, mask, others, found = batch["x"], batch["mask"], jnp.zeros(()), dict(state)
        for number, (name, layer) in enumerate(zip(self.layers, self.body, strict=True)):
            with jax.named_scope(f"{'stat' if name != 'dot' else 'dense'}_{number}"):
                x, moved, other = layer(params, found, x, mask)
            found |= moved
            others = others + other
        rows = jnp.mean(x * x)
        return rows + RATE * others, (found, others)

    def step(self, held: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        """Gradient descent, and the running state; the loss and the others beside."""
        (loss, (state, others)), grads = value_and_grad(self.loss, has_aux=True)(held["params"], held["state"], batch)
        return self.moved(held, grads, state), (loss, others)

    def moved(self, held: Any, grads: Any, state: Any) -> Any:
        return {"params": jax.tree.map(lambda p, g: p - RATE * g, held["params"], grads), "state": state}

    def by_hand(self, held: Any, batch: Any) -> Any:
        """The loop as a user writes it: each device walks through its own block of the batch."""

        def one(carry: Any, micro: Any) -> Any:
            state, sums = carry
            made = jax.value_and_grad(self.loss, has_aux=True)(held["params"], state, micro)
            (loss, (state, others)), grads = made
            return (state, jax.tree.map(jnp.add, sums, (loss, others, grads))), None

        def cut(x: Any) -> Any:
            seen = x.reshape(self.devices, self.parts, -1, *x.shape[1:])
            return jnp.moveaxis(seen, 1, 0).reshape(self.parts, -1, *x.shape[1:])

        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, held["params"]))
        (state, sums), _ = jax.lax.scan(one, (held["state"], zero), jax.tree.map(cut, batch))
        loss, others, grads = jax.tree.map(lambda x: x / self.parts, sums)
        return self.moved(held, grads, state), (loss, others)


class _Drawer:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng([seed, 2])
        self.params: dict[str, Array] = {}
        self.state: dict[str, Array] = {}
        self.drawn: list[str] = []  # what the layer at hand was made of

    def pick(self, *options: Any) -> Any:
        found = options[self.rng.integers(len(options))]
        self.drawn += [found] if isinstance(found, str) else []
        return found

    def param(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = self.rng.normal(size=shape) / 2
        return name

    def running(self, *shape: int) -> str:
        name = f"s{len(self.state)}"
        self.state[name] = self.rng.normal(size=shape) + 1
        return name


def _over(x: Array) -> tuple[int, ...]:
    """The dims that rows are counted along."""
    return tuple(range(x.ndim - 1))


def _count(x: Array) -> int:
    return x.size // x.shape[-1]


def _wide(x: Array, mask: Array) -> Array:
    """A mask of rows for each element of ``x``."""
    return jnp.broadcast_to(mask.reshape(-1, *[1] * (x.ndim - 1)), x.shape)


MEANS: dict[str, Statistic] = {
    "mean": lambda x, m: x.mean(_over(x)),
    "sum by count": lambda x, m: x.sum(_over(x)) / _count(x),
    "sum by factor": lambda x, m: x.sum(_over(x)) * (1 / _count(x)),
    "mean twice": lambda x, m: x.mean(0).mean(tuple(range(x.ndim - 2))),
    "masked": lambda x, m: (x * _wide(x, m)).sum(_over(x)) / jnp.maximum(_wide(x, m).sum(_over(x)), 1.0),
    "by one count": lambda x, m: (
        (x * _wide(x, m)).sum(_over(x)) / jnp.maximum(m.sum(), 1.0)
    ),  # of an op of its own: refused
}
SPREADS: dict[str, Statistic] = {
    "var": lambda x, m: x.var(_over(x)),
    "less one": lambda x, m: x.var(_over(x), ddof=1),
    "squares less square": lambda x, m: jnp.maximum((x * x).mean(_over(x)) - x.mean(_over(x)) ** 2, 0.0),
    "centred": lambda x, m: jnp.mean((x - x.mean(_over(x))) ** 2, _over(x)),
    "distance": lambda x, m: jnp.abs(x - x.mean(_over(x))).mean(_over(x)) ** 2,
    "largest": lambda x, m: jnp.max(jnp.abs(x), _over(x)) ** 2,
    "masked squares": lambda x, m: (x * x * _wide(x, m)).sum(_over(x)) / (_wide(x, m).sum(_over(x)) + 1),
}
MOVES: dict[str, Callable[[Array, Array], Array]] = {
    "decay": lambda old, new: 0.9 * old + 0.1 * new,
    "difference": lambda old, new: old + 0.1 * (new - old),
    "maximum": jnp.maximum,
}
OTHERS: dict[str, Statistic] = {
    "importance": lambda x, m: jnp.sum(x.mean(_over(x)) ** 2),
    "balance": lambda x, m: jnp.sum(
        jax.nn.one_hot(jnp.argmax(x, -1), WIDTH, dtype=x.dtype).mean(_over(x)) * jax.nn.softmax(x).mean(_over(x))
    ),
    "fourth": lambda x, m: jnp.mean((x - x.mean(_over(x))) ** 4),
    "spread": lambda x, m: jnp.sum(x.var(_over(x))),
    "largest": lambda x, m: jnp.sum(jnp.exp(-x).mean(_over(x)) * jnp.tanh(x).sum(_over(x))) / _count(x),
    "by the mask": lambda x, m: jnp.sum(((x * _wide(x, m)).sum(_over(x)) / (_wide(x, m).sum(_over(x)) + 1)) ** 2),
    "soft maximum": lambda x, m: jnp.mean(jax.nn.logsumexp(x, 0)),
    "by row": lambda x, m: jnp.mean(jax.nn.logsumexp(x, -1) ** 2),
    "root": lambda x, m: jnp.sqrt(jnp.sum(x.mean(_over(x)) ** 2) + EPS),
    "variation": lambda x, m: x.mean(_over(x)).var() / (x.mean(_over(x)).mean() ** 2 + 1),
}


def _dot(d: _Drawer) -> LayerFn:
    w = d.param(WIDTH, WIDTH)
    return lambda p, s, x, m: (jnp.tanh(x @ p[w]) + x / 2, {}, jnp.zeros(()))


def _norm(d: _Drawer) -> LayerFn:
    mean, spread = MEANS[d.pick(*MEANS)], SPREADS[d.pick(*SPREADS)]
    scale = d.param(WIDTH)
    return lambda p, s, x, m: ((x - mean(x, m)) / jnp.sqrt(spread(x, m) + EPS) * p[scale], {}, jnp.zeros(()))


def _softmax(d: _Drawer) -> LayerFn:
    return lambda p, s, x, m: (jax.nn.softmax(x, 0) * x, {}, jnp.zeros(()))


def _other(d: _Drawer) -> LayerFn:
    other = OTHERS[d.pick(*OTHERS)]
    return lambda p, s, x, m: (x, {}, other(x, m))


def _both(d: _Drawer) -> LayerFn:
    """A norm, and a loss of what it makes, in one scope."""
    norm, other = _norm(d), OTHERS[d.pick(*OTHERS)]

    def layer(p: Any, s: Any, x: Array, m: Array) -> Any:
        y = norm(p, s, x, m)[0]
        return y, {}, other(y, m)

    return layer


def _running(d: _Drawer) -> LayerFn:
    """State that is moved by a statistic; rows read the statistic, the state before, or the state behind."""
    of, name, read = (MEANS | SPREADS)[d.pick(*MEANS, *SPREADS)], d.running(WIDTH), d.pick("now", "before", "behind")
    moves = MOVES[d.pick(*MOVES)]

    def layer(p: Any, s: Any, x: Array, m: Array) -> Any:
        now = of(x, m)
        behind = moves(s[name], jax.lax.stop_gradient(now))
        # a statistic that no row reads is linear in sums: it needs no whole, and stays the whole batch's
        seen = {"now": now, "before": s[name] + now / 4, "behind": behind}[read]
        return x - seen / 2, {name: behind}, jnp.zeros(())

    return layer


def _layers(d: _Drawer) -> LayerFn:
    """A scan over layers, each with a product, a norm and perhaps running state or a loss of its own."""
    w, state = d.param(2, WIDTH, WIDTH), d.running(2, WIDTH)
    mean, spread = MEANS[d.pick(*MEANS)], SPREADS[d.pick(*SPREADS)]
    other = OTHERS[d.pick(*OTHERS)] if d.pick(True, False) else None
    reads = d.pick(True, False)

    def layer(p: Any, s: Any, x: Array, m: Array) -> Any:
        def one(carry: Any, own: Any) -> Any:
            x, others = carry
            kernel, before = own
            y = x @ kernel
            with jax.named_scope("stat_norm"):
                now = mean(y, m)
                y = (y - now) / jnp.sqrt(spread(y, m) + EPS) + (before if reads else 0)
                behind = 0.9 * before + 0.1 * jax.lax.stop_gradient(now)
                others = others + (other(y, m) if other is not None else 0)
            return (jnp.tanh(y) + x, others), behind

        (x, others), behind = jax.lax.scan(one, (x, jnp.zeros(())), (p[w], s[state]))
        return x, {state: behind}, others

    return layer


KINDS: dict[str, Callable[[_Drawer], LayerFn]] = {
    "dot": _dot,
    "norm": _norm,
    "softmax": _softmax,
    "other": _other,
    "both": _both,
    "running": _running,
    "layers": _layers,
}


def draw_model(seed: int) -> Model:
    """The model of ``seed``."""
    d = _Drawer(seed)
    devices = d.pick(1, 2)
    shape = d.pick((ROWS, WIDTH), (ROWS, WIDTH), (ROWS, 2, WIDTH))
    names = ["dot", *(d.pick(*KINDS) for _ in range(int(d.rng.integers(1, 4)))), d.pick("norm", "both", "running", "other")]
    body, drawn = [], []
    for name in names:
        d.drawn = []
        body.append(KINDS[name](d))
        drawn.append(f"{name}({', '.join(d.drawn)})")
    batch = {"x": d.rng.normal(size=shape), "mask": (d.rng.random(ROWS) < 0.7).astype(float)}
    return Model(names, d.params, d.state, batch, d.pick(2, 2, 4) if devices == 1 else 2, devices, body, drawn)


@dataclass(frozen=True)
class Outcome:
    """What came of a model: the largest difference, in units of 1e-9 of the leaf's largest; or why it is refused."""

    model: Model
    worst: float = 0.0
    where: str = ""
    refused: str = ""
    splits: int = 0

    @property
    def steps(self) -> list[str]:
        return self.model.layers


def measure_model(seed: int) -> Outcome:
    """The model of ``seed`` under ``accumulate(…, per_microbatch=…)``, and by hand, in float64, for two steps."""
    model = draw_model(seed)
    held = {"params": model.params, "state": model.state}
    inner = plans.data_parallel() if model.devices > 1 else None
    plan = plans.accumulate(model.parts, inner, per_microbatch=["stat_*"])
    try:
        lowered = jscaler.parallelize(plan, devices=model.devices)(model.step).lower(held, model.batch)
    except PlanError as error:
        return Outcome(model, refused=str(error))
    jscaler.verify(lowered)
    ours, theirs = lowered.compile(), jax.jit(model.by_hand)
    got = want = held
    worst, where = 0.0, ""
    for _ in range(2):
        (got, mine), (want, true) = ours(got, model.batch), theirs(want, model.batch)
        pairs = zip(jax.tree.leaves_with_path((got, mine)), jax.tree.leaves((want, true)), strict=True)
        for (path, a), b in pairs:
            off = _difference(np.asarray(a), np.asarray(b))
            if off > worst:
                worst, where = off, jax.tree_util.keystr(path)
    splits = sum(type(d).__name__ == "Trans" for d in lowered.plan.plan.decisions)
    return Outcome(model, worst, where, splits=splits)


def _difference(ours: np.ndarray, true: np.ndarray) -> float:
    if not np.array_equal(np.isnan(ours), np.isnan(true)):
        return math.inf
    allowed = 1e-9 * max(float(np.nanmax(np.abs(true), initial=0.0)), RATE)
    return float(np.nanmax(np.abs(ours - true), initial=0.0)) / allowed
