"""The interpreter against real execution, and what it refuses."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask, Share
from jscaler.verification.frames import Frame
from jscaler.verification.interpret import Interpreter
from jscaler.verification.local_programs import trace_local
from jscaler.verification.symbols import Broken, Constant, Leaves, Patterns, Symbolic

SIZES = {"a": 2, "b": 2, "c": 2}
NAMES = tuple(SIZES)
WHOLE = (4, 8)
MOST = 512  # cells of a local array


def run(fun: Callable[..., Any], masks: list[Mask], sizes: dict[str, int] = SIZES) -> tuple[Patterns, list[Any]]:
    frame = Frame(masks)
    local = trace_local(fun, sizes, [jax.ShapeDtypeStruct(frame.shape, jnp.float32)])
    patterns = Patterns(WHOLE)
    interpreter = Interpreter(sizes, patterns)
    return patterns, interpreter.run(local.jaxpr, local.bind([patterns.held(frame)], interpreter.constant))


def split_masks(combiner: str = "add") -> list[Mask]:
    """Rows cut by a, two shares along b, two shares of each along c."""
    shares = [(Share(b, 2, combiner), Share(c, 2, combiner)) for b, c in itertools.product(range(2), repeat=2)]
    return [Mask(((4,), (8,)), (((2 * a, 2 * a + 2),), ((0, 8),)), s) for a in range(2) for s in shares]


# Random programs: at each step one of these, drawn with the shape at hand.


def _axes(rng: np.random.Generator) -> tuple[str, ...]:
    return tuple(rng.permutation(NAMES)[: rng.integers(1, 4)].tolist())


def _groups(rng: np.random.Generator) -> dict[str, Any]:
    """Axes in any order, or explicit groups of all devices."""
    if rng.integers(2):
        return {"axis_name": _axes(rng)}
    return {"axis_name": NAMES, "axis_index_groups": rng.permutation(8).reshape(-1, rng.choice([2, 4])).tolist()}


def _size(over: dict[str, Any]) -> int:
    return len(over["axis_index_groups"][0]) if "axis_index_groups" in over else 2 ** len(over["axis_name"])


def _reduce(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    return lax.psum(x, **_groups(rng)) if rng.integers(4) else lax.pmax(x, **_groups(rng))


def _gather(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    over = _groups(rng)
    if x.size * _size(over) > MOST:
        return x
    return lax.all_gather(x, **over, axis=int(rng.integers(x.ndim)), tiled=bool(rng.integers(2)))


def _scatter(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    over, dim = _groups(rng), int(rng.integers(x.ndim))
    if x.shape[dim] % _size(over):
        return x
    return lax.psum_scatter(x, **over, scatter_dimension=dim, tiled=x.shape[dim] != _size(over) or bool(rng.integers(2)))


def _exchange(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    over, split, concat = _groups(rng), int(rng.integers(x.ndim)), int(rng.integers(x.ndim))
    if x.shape[split] % _size(over):
        return x
    tiled = x.shape[split] != _size(over) or bool(rng.integers(2))
    return lax.all_to_all(x, **over, split_axis=split, concat_axis=concat, tiled=tiled)


def _permute(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    axes = tuple(sorted(_axes(rng)))  # the mesh's order
    count = 2 ** len(axes)
    pairs = list(zip(rng.permutation(count).tolist(), rng.permutation(count).tolist(), strict=True))
    return lax.ppermute(x, axes, pairs[: rng.integers(1, count + 1)])


def _slice(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    dim = int(rng.integers(x.ndim))
    size = max(1, x.shape[dim] // 2)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(_axes(rng)) * size % (x.shape[dim] - size + 1), size, dim)


def _mask(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    return jnp.where(lax.axis_index(_axes(rng)) == 0, x, 0)


def _move(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    dim = int(rng.integers(x.ndim))
    moves = [
        lambda: x.T, lambda: jnp.flip(x, dim), lambda: jnp.roll(x, 1, dim), lambda: x.reshape(-1, x.shape[-1]),
        lambda: jnp.pad(x, [(1, 0)] * x.ndim)[tuple(slice(s) for s in x.shape)],
        lambda: jnp.take(x, jnp.asarray(rng.permutation(x.shape[dim])), dim),
        lambda: lax.dynamic_update_slice_in_dim(jnp.zeros_like(x), x[:1], lax.axis_index("a") % len(x), 0),
        lambda: x.at[0].set(x[-1]),
        lambda: jnp.concatenate([x[1:], x[:1]]),
        lambda: jnp.stack([x, jnp.zeros_like(x)]).sum(0) * 1,
    ]  # fmt: skip
    return moves[rng.integers(len(moves))]()


def _branch(x: jax.Array, rng: np.random.Generator) -> jax.Array:
    axis, other = rng.permutation(NAMES)[:2].tolist()
    apart = [lambda v: v[::-1], lambda v: lax.psum(v, other)]
    together = [lambda v: lax.psum(v[::-1], axis), lambda v: lax.psum(v, axis)]
    return lax.switch(lax.axis_index(axis), together if rng.integers(2) else apart, x)


STEPS = [_reduce, _gather, _scatter, _exchange, _permute, _slice, _mask, _move, _move, _branch]


def program(x: jax.Array, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        x = STEPS[rng.integers(len(STEPS))](x, rng)
    return x


def numbers_of(pattern: Any, element: int, values: dict[Any, np.ndarray], join: Any) -> float | None:
    """What a cell holds, given what each leaf holds; None where it is not predicted."""
    if isinstance(pattern, Broken):
        return None
    if isinstance(pattern, Constant):
        return 0.0 if "add" in pattern.neutral else None
    found = []
    for path, count in pattern.counts:
        leaves = [v[element] for leaf, v in values.items() if leaf[: len(path)] == path]
        found += [join.reduce(leaves)] * count
    return float({"max": np.max, "add": np.sum, None: np.sum}[pattern.combiner](found))


@pytest.mark.smoke
@pytest.mark.parametrize(("combiner", "join", "seeds"), [("add", np.add, range(40)), ("max", np.maximum, range(40, 60))])
def test_symbols_predict_the_numbers_of_random_programs(combiner: str, join: Any, seeds: range) -> None:
    masks = split_masks(combiner)
    rng = np.random.default_rng(1)
    values = {m.shares: rng.integers(-50, 50, WHOLE).ravel().astype(np.float32) for m in masks}
    parts = [values[m.shares].reshape(WHOLE)[slice(*m.box[0][0])] for m in masks]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), NAMES)
    stacked = jax.device_put(np.stack(parts), NamedSharding(mesh, P(NAMES)))

    def local(x: jax.Array) -> list[jax.Array]:
        return [program(x[0], seed)[None] for seed in seeds]

    ended = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(NAMES), out_specs=P(NAMES), check_vma=False))(stacked)
    patterns, symbols = run(lambda x: [program(x, seed) for seed in seeds], masks)
    predicted = 0
    for seed, real, cells in zip(seeds, ended, symbols, strict=True):
        assert isinstance(cells, Symbolic)
        assert real.shape == cells.shape
        table = zip(np.asarray(real).ravel(), cells.element.ravel(), cells.pattern.ravel(), strict=True)
        for number, element, pattern in table:
            expected = numbers_of(patterns[pattern], element, values, join)
            if expected is not None:
                assert number == expected, f"program {seed}: {patterns[pattern]} of element {element}"
                predicted += 1
    assert predicted > 0.3 * sum(cells.element.size for cells in symbols)


# One thing at a time


def rows(cells: Symbolic) -> list[list[int]]:
    return cells.element.reshape(len(cells.element), -1).tolist()


PAIR = {"x": 2}
HALVES = [Mask(((4,), (8,)), (((2 * i, 2 * i + 2),), ((0, 8),))) for i in range(2)]


def test_axis_names_are_taken_in_the_order_of_the_equation() -> None:
    masks = [Mask(((4,), (8,)), (((i, i + 1),), ((0, 1),))) for i in range(4)]
    for axes, order in ((("a", "b"), [0, 8, 16, 24]), (("b", "a"), [0, 16, 8, 24])):
        _, (cells,) = run(lambda x, axes=axes: lax.all_gather(x, axes, tiled=True), masks, {"a": 2, "b": 2})
        assert rows(cells) == [order] * 4


def test_devices_without_a_source_receive_zeros() -> None:
    patterns, (cells,) = run(lambda x: lax.ppermute(x, "x", [(0, 1)]), HALVES, PAIR)
    assert patterns[cells.pattern[0, 0, 0]] == Constant(frozenset({"add"}))
    assert cells.element[1, 0, 0] == 0


def test_concrete_work_is_done_with_numbers() -> None:
    def fun(x: jax.Array) -> list[jax.Array]:
        i = lax.axis_index("x")
        return [lax.psum(i, "x"), jnp.sin(i * 1.0), jnp.arange(4)[i], lax.while_loop(lambda c: c < 5, lambda c: c + 2, i)]

    _, (total, sine, picked, loop) = run(fun, HALVES, PAIR)
    assert total.tolist() == [1, 1]
    np.testing.assert_allclose(sine, np.sin([0, 1]), rtol=1e-6)
    assert picked.tolist() == [0, 1]
    assert loop.tolist() == [6, 5]


def test_a_conversion_to_whole_numbers_breaks_summands_only() -> None:
    shares = [Mask(((4,), (8,)), (((0, 4),), ((0, 8),)), (Share(i, 2),)) for i in range(2)]
    patterns, (cells,) = run(lambda x: x.astype(jnp.int32), shares, PAIR)
    assert isinstance(patterns[cells.pattern[0, 0, 0]], Broken)
    patterns, (cells,) = run(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), shares, PAIR)
    assert isinstance(patterns[cells.pattern[0, 0, 0]], Leaves)
    patterns, (cells,) = run(lambda x: x.astype(jnp.int32), HALVES, PAIR)
    assert cells.pattern[0, 0, 0] == patterns.whole


def test_data_times_one_is_data_and_times_two_is_not() -> None:
    patterns, (cells,) = run(lambda x: x * (1 + lax.axis_index("x")), HALVES, PAIR)
    assert cells.pattern[0, 0, 0] == patterns.whole
    broken = patterns[cells.pattern[1, 0, 0]]
    assert isinstance(broken, Broken)
    assert "multiplied, mul at " in broken.reason


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (lambda x: jnp.sin(x), r"^sin at .*test_interpret.py:\d+.* works on data under way"),
        (lambda x: lax.dynamic_slice_p.bind(x, *[x[0, 0].astype(int)] * 2, slice_sizes=(1, 1)), "takes its indices from"),
        (lambda x: lax.dynamic_slice(x, (lax.axis_index("x") * 2, 0), (1, 8)), r"beyond its array on devices \[1\]"),
        (lambda x: lax.psum(x, ("x", "x")), r"runs along \['x', 'x'\]; the mesh has \['x'\]"),
        (lambda x: lax.cond(x[0, 0].astype(bool), lambda v: v, lambda v: v + 0, x), "branches on data"),
        (lambda x: lax.psum(x, "x", axis_index_groups=[[0]]), r"groups \[\[0\]\], which do not part 2"),
        (lambda x: lax.ppermute(x, "x", [(0, 1), (1, 1)]), r"member 1 receives twice in \[\(0, 1\), \(1, 1\)\]"),
        (lambda x: lax.ppermute(x, "x", [(0, 1), (0, 0)]), "member 0 sends twice"),
    ],
)  # fmt: skip
def test_what_is_refused(fun: Callable[..., Any], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        run(fun, HALVES, PAIR)


def test_a_ppermute_out_of_the_mesh_s_order_is_refused() -> None:
    """JAX 0.10 numbers its members in the mesh's order without a word."""
    masks = [Mask.whole(WHOLE)] * 4
    with pytest.raises(VerificationError, match="must name its axes in the mesh's order"):
        run(lambda x: lax.ppermute(x, ("b", "a"), [(0, 1)]), masks, {"a": 2, "b": 2})


# Branches


def test_branches_without_a_meeting_run_by_themselves() -> None:
    shares = [Mask(((4,), (8,)), (((0, 4),), ((0, 8),)), (Share(b, 2),)) for _ in range(2) for b in range(2)]

    def fun(x: jax.Array) -> jax.Array:
        return lax.cond(lax.axis_index("a") == 0, lambda v: lax.psum(v, "b"), lambda v: v, x)

    patterns, (cells,) = run(fun, shares, {"a": 2, "b": 2})
    first = cells.pattern[:, 0, 0].tolist()
    assert first[:2] == [patterns.whole] * 2
    assert [patterns[i] for i in first[2:]] == [Leaves(None, (((Share(i, 2),), 1),)) for i in range(2)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda v: v, r"devices \[0\] wait in psum over x at .* for devices \[1\], which end their branch without it"),
        (
            lambda v: lax.psum(lax.pmax(v, "x"), "x"),
            r"devices \[1\] wait in pmax over x at .* for devices \[0\], which are in psum over x",
        ),
        (
            lambda v: lax.cond(v.sum() == 0, lambda w: w, lambda w: lax.pmin(w, "x"), v),
            r"wait in pmin over x at .* which are in psum over x",
        ),
    ],
)
def test_branches_that_would_wait_for_each_other(other: Callable[..., Any], message: str) -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.cond(lax.axis_index("x") == 0, lambda v: lax.psum(v, "x"), other, x)

    with pytest.raises(VerificationError, match=message):
        run(fun, HALVES, PAIR)


def test_branches_inside_a_branch_ask_only_its_own_devices() -> None:
    masks = [Mask.whole(WHOLE)] * 4

    def inner(x: jax.Array) -> jax.Array:
        """Devices 0 and 1 agree; 2 and 3, which are elsewhere, would not."""
        odd = lax.axis_index(("a", "b")) == 3
        return lax.cond(odd, lambda v: lax.pmax(v, "b"), lambda v: lax.pmin(v, "b"), x)

    def fun(x: jax.Array) -> jax.Array:
        return lax.cond(lax.axis_index("a") == 0, inner, lambda v: v, x)

    patterns, (cells,) = run(fun, masks, {"a": 2, "b": 2})
    assert (cells.pattern == patterns.whole).all()
