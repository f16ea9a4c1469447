"""Fold explicit padding into the windows next to it: ``jnp.pad`` before a VALID convolution, and in gradients.

    pad(x, 0, low=1, high=1) ; reduce_window_sum(padding 0)     becomes     reduce_window_sum(x, padding 1, 1)
    conv(x, k, padding 2, 2) ; pad(low=-1, high=-1)             becomes     conv(x, k, padding 1, 1)

A padded tensor has more rows than its parts can share out evenly; padded windows do not mind.
"""

from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import Atom, live_equations, make_jaxpr
from jscaler.capture.jaxprs import dtype as dtype_of
from jscaler.lax_primitives import Windows, is_cast, known
from jscaler.rules.neutral import neutral

Makers = dict[core.Var, core.JaxprEqn]


def fold_pads(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """``jaxpr`` without the paddings that only windows read, and that pad what these windows pad anyway."""
    if not any(e.primitive.name == "pad" for e in jaxpr.eqns):
        return jaxpr
    uses = [v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)] + list(jaxpr.outvars)
    makers: Makers = {}
    for eqn in jaxpr.eqns:
        source = eqn.invars[0] if eqn.invars else None
        inner = makers.get(source) if isinstance(source, core.Var) and uses.count(source) == 1 else None
        made = None
        windows = known(eqn.primitive).windows
        if inner is not None and inner.primitive.name == "pad" and windows is not None:
            made = _padded(eqn, windows, inner, makers)
        elif inner is not None and inner.primitive.name == "conv_general_dilated" and eqn.primitive.name == "pad":
            made = _cropped(inner, eqn)
        makers.update(dict.fromkeys(eqn.outvars, made or eqn))
    eqns = list({id(e): e for e in makers.values()}.values()) + [e for e in jaxpr.eqns if not e.outvars]
    order = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    eqns.sort(key=lambda e: order[e.outvars[0]] if e.outvars else len(order))
    return make_jaxpr(live_equations(eqns, jaxpr.outvars), jaxpr.invars, jaxpr.outvars, jaxpr)


def _padded(eqn: core.JaxprEqn, windows: Windows, pad: core.JaxprEqn, makers: Makers) -> core.JaxprEqn | None:
    """Windows that pad for themselves; None where they would pad something else."""
    value = _constant(pad.invars[1], makers)
    dtype, fill = dtype_of(pad.invars[0]), windows.fills(eqn)[0]
    if windows.fold is None or value is None or fill is None or value.astype(dtype) != np.asarray(neutral(fill, dtype)):
        return None
    params = windows.fold(eqn, pad.params["padding_config"])
    return eqn.replace(invars=[pad.invars[0], *eqn.invars[1:]], params=params) if params else None


def _constant(atom: Atom, makers: Makers) -> Any:
    """The number that is padded with, behind casts; None where it is none."""
    while isinstance(atom, core.Var):
        if not is_cast(makers.get(atom)):
            return None
        atom = makers[atom].invars[0]
    return np.asarray(atom.val)


def _cropped(conv: core.JaxprEqn, pad: core.JaxprEqn) -> core.JaxprEqn | None:
    """A convolution without its first and last windows; None where more than that happens."""
    config = pad.params["padding_config"]
    batch, feature, *places = conv.params["dimension_numbers"].out_spec
    crops = all(low <= 0 and high <= 0 and gaps == 0 for low, high, gaps in config)
    if not crops or any(any(config[d]) for d in (batch, feature)):
        return None
    each = zip(conv.params["padding"], conv.params["window_strides"], places, strict=True)
    padding = tuple((int(low + config[d][0] * s), int(high + config[d][1] * s)) for (low, high), s, d in each)
    return conv.replace(outvars=pad.outvars, params={**conv.params, "padding": padding})
