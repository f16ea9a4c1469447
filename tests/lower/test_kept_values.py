"""What a block keeps for later ones: against every choice of what is made again."""

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import given
from jax.extend import core
from of_the_day import drawn

from jscaler.capture.jaxprs import trace_flat
from jscaler.lower.flat_program import reads, results
from jscaler.lower.kept_values import A_VALUE, Cuttable, _is_cheap, saved_or_again

# what an equation does with one or two values before it: a product cannot be made again cheaply, the others can
STEPS = ("tanh", "mul", "half", "take", "grow", "dot")


@st.composite
def programs(draw: Any) -> tuple[core.Jaxpr, set[int]]:
    """A few equations in a row, and which of their results later blocks read."""
    kinds = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=7))
    places = [[draw(st.integers(0, i)) for _ in range(2)] for i in range(len(kinds))]

    def run(x: jax.Array) -> list[jax.Array]:
        made = [x]
        for kind, (a, b) in zip(kinds, places, strict=True):
            one, other = made[a], made[b]
            if kind == "mul" and one.shape == other.shape and one.dtype == other.dtype:
                made.append(one * other)
            elif kind == "half":
                made.append(one.astype(jnp.bfloat16) if one.dtype == jnp.float32 else one + 1)
            elif kind == "take":
                made.append(one[:, :4])
            elif kind == "grow":
                made.append(jnp.tile(one[:, :8], (1, 8)))
            elif kind == "dot":
                made.append((one @ one.T)[:, :8])
            else:
                made.append(jnp.tanh(one))
        return made[1:]

    jaxpr = trace_flat(run, [jax.typeof(jnp.ones((8, 16)))])
    needed = draw(st.sets(st.integers(0, len(kinds) - 1), min_size=1))
    return jaxpr, needed


def cost(v: core.Var) -> int:
    aval: Any = v.aval
    return math.prod(aval.shape) * aval.dtype.itemsize + A_VALUE


def kept(parts: list[list[Any]], outside: set[core.Var]) -> int:
    """What the second block reads that it does not make."""
    own = {v for item in parts[1] for v in results(item)}
    return sum(map(cost, {v for item in parts[1] for v in reads(item)} - own - outside))


@given(programs())
@drawn(120, deadline=None)
def test_kept_bytes_are_the_fewest_of_all_choices(drawn_program: tuple[core.Jaxpr, set[int]]) -> None:
    jaxpr, needed = drawn_program
    first = list(jaxpr.eqns)
    values = [jaxpr.outvars[i] for i in sorted(needed)]
    values = [v for v in dict.fromkeys(values) if isinstance(v, core.Var)]
    reader = trace_flat(lambda *xs: [sum(x.astype(jnp.float32).sum() for x in xs)], [v.aval for v in values])
    table = dict(zip(reader.invars, values, strict=True))
    second = [e.replace(invars=[table.get(a, a) if isinstance(a, core.Var) else a for a in e.invars]) for e in reader.eqns]
    arrived = {jaxpr.invars[0]: 0}
    blocks = [Cuttable(tuple(first), tuple(v for e in first[-1:] for v in e.outvars)), Cuttable(tuple(second), ())]
    parts, originals = saved_or_again(blocks, arrived, set())
    assert parts[0] == first
    cheap = [e for e in first if _is_cheap(e)]
    assert all(any(original in e.outvars for e in cheap) for original in originals.values())
    ours, best = kept(parts, set()), math.inf
    for count in range(len(cheap) + 1):
        for again in itertools.combinations(cheap, count):
            best = min(best, kept([first, [*again, *second]], set()))
    assert ours == best
