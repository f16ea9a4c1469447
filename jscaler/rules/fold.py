"""Fold explicit padding into the windows that read it: ``jnp.pad`` before a VALID convolution, an average's gradient.

    pad(x, 0, low=1, high=1) ; reduce_window_sum(padding 0)     becomes     reduce_window_sum(x, padding 1, 1)

A padded tensor has more rows than its parts can share out evenly; padded windows do not mind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import make_jaxpr
from jscaler.rules.neutral import neutral

Config = Sequence[tuple[int, int, int]]


def fold_pads(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """``jaxpr`` without the paddings that only windows read, and that pad what these windows pad anyway."""
    if not any(e.primitive.name == "pad" for e in jaxpr.eqns):
        return jaxpr
    uses = [v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)] + list(jaxpr.outvars)
    pads = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "pad" and uses.count(e.outvars[0]) == 1}
    eqns, gone = [], set()
    for eqn in jaxpr.eqns:
        pad = pads.get(eqn.invars[0]) if eqn.invars and isinstance(eqn.invars[0], core.Var) else None
        params = _folded(eqn, pad) if pad is not None and eqn.primitive.name in FOLDS else None
        if pad is not None and params is not None:
            gone.add(id(pad))
            eqn = eqn.replace(invars=[pad.invars[0], *eqn.invars[1:]], params=params)
        eqns.append(eqn)
    return make_jaxpr([e for e in eqns if id(e) not in gone], jaxpr.invars, jaxpr.outvars, jaxpr) if gone else jaxpr


def _folded(eqn: core.JaxprEqn, pad: core.JaxprEqn) -> dict[str, Any] | None:
    """The parameters of windows that pad for themselves; None where they would pad something else."""
    combiner, fold = FOLDS[eqn.primitive.name]
    value = pad.invars[1]
    plain = isinstance(value, core.Literal) and np.asarray(value.val) == np.asarray(neutral(combiner, value.aval.dtype))
    return fold(eqn, pad.params["padding_config"]) if plain else None


def _sum_up(padding: Any, base: Any, config: Config) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Paddings and dilations one after the other, as one."""
    each = list(zip(padding, base, config, strict=True))
    both = tuple((int(low + b * more), int(high + b * rest)) for (low, high), b, (more, rest, _) in each)
    return both, tuple(int(b * (gaps + 1)) for _, b, (_, _, gaps) in each)


def _fold_conv(eqn: core.JaxprEqn, config: Config) -> dict[str, Any] | None:
    batch, feature, *places = eqn.params["dimension_numbers"].lhs_spec
    if any(any(config[d]) for d in (batch, feature)):
        return None
    both, base = _sum_up(eqn.params["padding"], eqn.params["lhs_dilation"], [config[d] for d in places])
    return {**eqn.params, "padding": both, "lhs_dilation": base}


def _fold_reduce(eqn: core.JaxprEqn, config: Config) -> dict[str, Any] | None:
    both, base = _sum_up(eqn.params["padding"], eqn.params["base_dilation"], config)
    if any(side < 0 for pair in both for side in pair):
        return None
    return {**eqn.params, "padding": both, "base_dilation": base}


FOLDS: dict[str, tuple[Any, Callable[[core.JaxprEqn, Config], dict[str, Any] | None]]] = {
    "conv_general_dilated": ("add", _fold_conv),
    "reduce_window_sum": ("add", _fold_reduce),
    "reduce_window_max": ("max", _fold_reduce),
    "reduce_window_min": ("min", _fold_reduce),
}
