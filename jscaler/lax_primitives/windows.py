"""Specs of windowed equations: convolutions, pooling, and what their gradients are made of.

Along one dim, window ``r`` reads row ``i`` of the operand at its tap ``t`` where

    r · stride + t · dilation - low  ==  i · base

    rows      0 1 | 2 3 | 4 5          3 taps, stride 1, low 1 (SAME): a part of 2 rows reads 1 row before and 1 after
    windows   ‾‾‾‾‾‾‾                  what lies beyond the border of the whole holds the padding value

If ``steps · stride == size · base``, part j of the windows starts where part j of the rows does, whatever the number of
parts: the windows and the rows are one index, and the rows that a part reads beyond its own (its `Halo`) are the same
for all parts. A kernel's gradient slides the same way over its taps, which are then the rows of the result's gradient:
there the index is reduced. Windows that sit side by side (a patch convolution) have no halo.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.ir import Halo
from jscaler.ir.equations import shape
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives.primitive import Part, Primitive, Windows
from jscaler.lax_primitives.spec import Label, Spec, SpecFunction, Window, dims

INSIDE = "it is the inside of a window"


@dataclass(frozen=True)
class Sweep:
    """How windows slide along one dim.

    Attributes:
        size: rows of the operand, ``base`` apart.
        steps, stride: how many windows there are, and how far apart.
        taps, dilation: how many rows a window reads, and how far apart.
        low: padding before the first row; negative where rows are left out.
        kernel: whether the taps are a dim of an operand, and not of the windows alone, as a reduction's are.
    """

    size: int
    base: int
    steps: int
    stride: int
    taps: int
    dilation: int
    low: int
    kernel: bool

    @property
    def over_taps(self) -> bool:
        """Whether the taps are the index that can be split (in a kernel's gradient), and not the windows."""
        fits = (self.steps * self.stride == self.size * self.base, self.taps * self.dilation == self.size * self.base)
        return self.kernel and (fits == (False, True) or (all(fits) and self.taps > self.steps))

    @property
    def count(self) -> int:
        """Windows (or taps) that slide over the rows."""
        return self.taps if self.over_taps else self.steps

    @property
    def step(self) -> int:
        return self.dilation if self.over_taps else self.stride

    @property
    def span(self) -> int:
        """How far one of them reaches beyond the row it starts at."""
        return (self.steps - 1) * self.stride if self.over_taps else (self.taps - 1) * self.dilation

    @property
    def alike(self) -> bool:
        """Whether all parts run the same program."""
        shortest = self.size // self.parts  # the rows of the smallest part, of which something must be left
        return self.count * self.step == self.size * self.base and shortest + self.before + self.after > 0

    @property
    def parts(self) -> int:
        """The most parts that both sides can be cut into."""
        return math.gcd(self.size, self.count)

    @property
    def before(self) -> int:
        """Rows read before the part's own; negative where the first ones are not read."""
        return self.low // self.base

    @property
    def after(self) -> int:
        return (self.span - self.low - self.step) // self.base + 1

    @property
    def halo(self) -> Halo:
        return Halo(max(0, self.before), max(0, self.after))

    @property
    def padding(self) -> tuple[int, int]:
        """What is left to pad, in dilated rows, once the operand has exactly ``before`` and ``after`` rows more."""
        low = self.low - self.before * self.base
        return low, self.base - self.step + self.span - self.low - self.after * self.base

    @property
    def why(self) -> str:
        """Why the dim cannot be split."""
        return (
            f"windows of {self.taps} rows and stride {self.stride} make {self.steps} rows of {self.size}: parts are alike "
            "only where stride times windows is the number of rows (padding 'SAME' on a multiple of the stride)"
        )


def scattered(sweep: Sweep) -> tuple[tuple[int, int], tuple[int, int]]:
    """For the gradient of a maximum's windows: what a part reads (before, after) of the windows' gradients and of the rows.

    A row's gradient comes from every window that reads it, so those windows are looked at whole.
    """
    before, after = (sweep.taps - 1 - sweep.low) // sweep.stride, (sweep.low - 1) // sweep.stride + 1
    rows = (sweep.low + before * sweep.stride, (after - 1) * sweep.stride - sweep.low + sweep.taps)
    return (before, after), rows


@dataclass(frozen=True)
class WindowCut:
    """The labels of one dim on the rows' side and on the windows' side; reasons where they cannot be split."""

    rows: tuple[Label, ...]
    windows: tuple[Label, ...]
    blocked: dict[Label, str]


def cut(sweep: Sweep, name: Any) -> WindowCut:
    """Rows and windows as one index as far as their sizes have a common divisor; the rest is inside of windows."""
    if not sweep.alike:
        rows, windows = (dims((n,), ((name, side),))[0] for n, side in ((sweep.size, "rows"), (sweep.count, "windows")))
        return WindowCut(rows, windows, dict.fromkeys((*rows, *windows), sweep.why))
    index = dims((sweep.parts,), (name,))[0]
    inside = dims((sweep.size // sweep.parts,), ((name, "rows"),))[0]
    made = dims((sweep.count // sweep.parts,), ((name, "windows"),))[0]
    return WindowCut((*index, *inside), (*index, *made), dict.fromkeys((*inside, *made), INSIDE))


def plain(sweep: Sweep) -> bool:
    """Whether each row is its own window: no window at all."""
    return sweep == Sweep(sweep.size, 1, sweep.size, 1, 1, 1, 0, sweep.kernel)


def reduce_sweeps(eqn: core.JaxprEqn) -> list[Sweep]:
    """How the windows of a reduction slide along each dim."""
    return _sweeps(eqn, shape(eqn.outvars[0]))


def scatter_sweeps(eqn: core.JaxprEqn) -> list[Sweep]:
    """How the windows of a maximum's gradient slide along each dim."""
    return _sweeps(eqn, shape(eqn.invars[0]))


def _sweeps(eqn: core.JaxprEqn, result: Sequence[int]) -> list[Sweep]:
    params, operand = eqn.params, shape(eqn.invars[-1])
    ones = (1,) * len(operand)
    base, dilation = (params.get(k) or ones for k in ("base_dilation", "window_dilation"))
    lows = (low for low, _ in params["padding"])
    each = zip(operand, base, result, params["window_strides"], params["window_dimensions"], dilation, lows, strict=True)
    return [Sweep(*map(int, one), kernel=False) for one in each]


def conv_sweeps(eqn: core.JaxprEqn) -> list[Sweep]:
    """How the windows of a convolution slide along each of its spatial dims."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    operand, kernel, result = (shape(v) for v in (*eqn.invars, *eqn.outvars))
    places = zip(numbers.lhs_spec[2:], numbers.out_spec[2:], numbers.rhs_spec[2:], strict=True)
    ways = zip(
        params["lhs_dilation"], params["window_strides"], params["rhs_dilation"], params["padding"], places, strict=True
    )
    return [
        Sweep(*map(int, (operand[i], base, result[o], stride, kernel[k], dilation, low)), kernel=True)
        for base, stride, dilation, (low, _), (i, o, k) in ways
    ]


def _spatial(eqn: core.JaxprEqn) -> tuple[list[dict[int, tuple[Label, ...]]], dict[Label, str], tuple[Window, ...]]:
    """The spatial dims of a convolution, or of its gradient with respect to its operand or kernel.

    Returns:
        Labels by dim of the operand, the kernel and the result; reasons where they cannot be split; the windows.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, kernel, result, blocked, windows = {}, {}, {}, {}, []
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for number, (sweep, (i, k, o)) in enumerate(zip(conv_sweeps(eqn), places, strict=True)):
        one = cut(sweep, ("space", number))
        other = dims((sweep.steps if sweep.over_taps else sweep.taps,), (("inside", number),))[0]
        operand[i] = one.rows
        kernel[k], result[o] = (one.windows, other) if sweep.over_taps else (other, one.windows)
        blocked.update(one.blocked | dict.fromkeys(other, INSIDE))
        if sweep.alike and not plain(sweep):
            windows.append(Window((i, k if sweep.over_taps else None), (sweep.halo, Halo(0, 0)), number))
    return [operand, kernel, result], blocked, tuple(windows)


def convolution(eqn: core.JaxprEqn) -> Spec:
    """A convolution: samples pass, spatial dims slide, features are contracted within their group; groups are an index.

    Groups are of features, or (in the gradient of a grouped kernel) of samples, and major in the dims that have them.
    """
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    (operand, kernel, result), blocked, windows = _spatial(eqn)
    of_features = (("group", params["feature_group_count"]),)
    of_samples = (("group", params["batch_group_count"]),)
    sides = (
        (eqn.invars[0], numbers.lhs_spec, operand, ((of_samples, "batch"), (of_features, "in"))),
        (eqn.invars[1], numbers.rhs_spec, kernel, ((of_features + of_samples, "out"), ((), "in"))),
        (eqn.outvars[0], numbers.out_spec, result, (((), "batch"), (of_features + of_samples, "out"))),
    )
    tensors = []
    for atom, places, labels, own in sides:
        for place, (groups, name) in zip(places[:2], own, strict=True):
            count = math.prod(n for _, n in groups)
            every = (*groups, (name, shape(atom)[place] // count))
            labels[place] = tuple(label for label in every if label[1] != 1)
        tensors.append(tuple(labels[d] for d in range(len(places))))
    return Spec((tensors[0], tensors[1]), (tensors[2],), blocked=blocked, linear="each", windows=windows)


def _local_groups(part: Part, eqn: core.JaxprEqn) -> dict[str, int]:
    """How many groups a part of a convolution has."""
    numbers = eqn.params["dimension_numbers"]
    operand, kernel, result = (part.shape(v) for v in (*eqn.invars, *eqn.outvars))
    features = operand[numbers.lhs_spec[1]] // kernel[numbers.rhs_spec[1]]
    samples = operand[numbers.lhs_spec[0]] // result[numbers.out_spec[0]]
    return {"feature_group_count": features, "batch_group_count": samples}


def reduce_window(linear: str = "") -> SpecFunction:
    """Reduce the rows of each window."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        sweeps = reduce_sweeps(eqn)
        cuts = [cut(sweep, d) for d, sweep in enumerate(sweeps)]
        blocked = {label: why for one in cuts for label, why in one.blocked.items()}
        count = len(eqn.invars)
        windows = tuple(
            Window((d,) * count, (s.halo,) * count, d) for d, s in enumerate(sweeps) if s.alike and not plain(s)
        )
        operand, result = (tuple(getattr(one, side) for one in cuts) for side in ("rows", "windows"))
        return Spec((operand,) * count, (result,) * len(eqn.outvars), blocked=blocked, linear=linear, windows=windows)

    return spec


def select_and_scatter_add(eqn: core.JaxprEqn) -> Spec:
    """The gradient of a maximum's windows: each window's gradient goes to the row that was the largest."""
    sweeps = scatter_sweeps(eqn)
    cuts = [cut(sweep, d) for d, sweep in enumerate(sweeps)]
    blocked = {label: why for one in cuts for label, why in one.blocked.items()}
    windows = tuple(
        Window((d, d), tuple(Halo(max(0, a), max(0, b)) for a, b in scattered(s)), d)
        for d, s in enumerate(sweeps)
        if s.alike and not plain(s)
    )
    rows, made = (tuple(one.rows for one in cuts), tuple(one.windows for one in cuts))
    return Spec((made, rows), (rows,), blocked=blocked, linear="first", windows=windows)


Padding = Sequence[tuple[int, int, int]]  # as in the configuration of a pad


def _sum_up(padding: Any, base: Any, config: Padding) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Paddings and dilations one after the other, as one."""
    each = list(zip(padding, base, config, strict=True))
    both = tuple((int(low + b * more), int(high + b * rest)) for (low, high), b, (more, rest, _) in each)
    return both, tuple(int(b * (gaps + 1)) for _, b, (_, _, gaps) in each)


def _fold_conv(eqn: core.JaxprEqn, config: Padding) -> dict[str, Any] | None:
    batch, feature, *places = eqn.params["dimension_numbers"].lhs_spec
    if any(any(config[d]) for d in (batch, feature)):
        return None
    both, base = _sum_up(eqn.params["padding"], eqn.params["lhs_dilation"], [config[d] for d in places])
    return {**eqn.params, "padding": both, "lhs_dilation": base}


def _fold_reduce(eqn: core.JaxprEqn, config: Padding) -> dict[str, Any] | None:
    both, base = _sum_up(eqn.params["padding"], eqn.params["base_dilation"], config)
    if any(side < 0 for pair in both for side in pair):
        return None
    return {**eqn.params, "padding": both, "base_dilation": base}


def _selected(eqn: core.JaxprEqn) -> tuple[Combiner, Combiner]:
    return "add", "max" if eqn.params["select_prim"].name == "ge" else "min"


def _conv_flops(eqn: core.JaxprEqn) -> float:
    """Taps of a window times its input channels, which a grouped kernel holds for one group."""
    numbers = eqn.params["dimension_numbers"]
    kernel = shape(eqn.invars[1])
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
    return 2.0 * math.prod(shape(eqn.outvars[0])) * taps / eqn.params["batch_group_count"]


def _same_fill(combiner: Combiner) -> Windows:
    return Windows(reduce_sweeps, lambda eqn: (combiner,), _fold_reduce)


def _conv_fills(eqn: core.JaxprEqn) -> tuple[Combiner | None, ...]:
    """A kernel's gradient reads the gradient of the result as it is."""
    return ("add", None)


RECORDS = (
    Primitive(
        "conv_general_dilated", convolution, shaped=_local_groups, role="contracts", flops=_conv_flops, weight=85,
        word="conv", windows=Windows(conv_sweeps, _conv_fills, _fold_conv, grouped=True),
    ),
    Primitive(
        "reduce_window_sum", reduce_window("add"), windows=_same_fill("add"), role="reduces", cost="reduced"
    ),
    Primitive("reduce_window_max", reduce_window(), windows=_same_fill("max"), role="reduces", cost="reduced"),
    Primitive("reduce_window_min", reduce_window(), windows=_same_fill("min"), role="reduces", cost="reduced"),
    Primitive("reduce_window", why="its combiner is a program", role="reduces", cost="reduced"),
    Primitive("select_and_gather_add", reduce_window("first"), windows=Windows(reduce_sweeps, _selected)),
    Primitive(
        "select_and_scatter_add", select_and_scatter_add, windows=Windows(scatter_sweeps, _selected, scatters=True)
    ),
    Primitive("select_and_scatter", why="its combiner is a program"),
)  # fmt: skip
