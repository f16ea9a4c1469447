"""Floating-point operations of an executable's products and convolutions, each as often as it runs.

XLA's own count takes a loop's body once, and what a CUDA library multiplies not at all. This one reads the optimized HLO:
products stand there as ``dot``, as ``convolution`` or as calls of cuBLAS, and `jscaler.report.hlo_loops` knows how often a
line runs. What is computed again in a backward counts again.
"""

import math
import re

from jscaler.report.hlo_loops import times

_MADE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]")
_PRODUCT = re.compile(r"\b(?:dot|custom-call)\(([^)]*)\)")
_CONVOLUTION = re.compile(r"\bconvolution\(([^)]*)\).*\bdim_labels=\w+_(\w+)->")
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([^\]}]*)[\]}]')


def dot_flops(text: str) -> float:
    """2·b·m·n·k of every product in an optimized HLO text, over all iterations of its loops; of a convolution twice what
    each element of its result is a sum of, padding included.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> chain = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
        >>> dot_flops(jax.jit(chain).lower(jnp.ones((8, 8))).compile().as_text()) == 5 * 2 * 8**3
        True
    """
    lines = text.splitlines()
    made = [_MADE.match(line) for line in lines]
    shapes = {m[1]: _dims(m[2]) for m in made if m}
    found = zip(lines, made, times(lines), strict=True)
    return sum(count * _flops(line, shapes[m[1]], shapes) for line, m, count in found if m)


def _flops(line: str, result: list[int], shapes: dict[str, list[int]]) -> float:
    convolution = _CONVOLUTION.search(line)
    if convolution is not None:
        kernel = _operand(convolution[1], 1, shapes)
        return 2.0 * math.prod(result) * math.prod(kernel) / kernel[convolution[2].index("o")]
    product, contracted = _PRODUCT.search(line), _CONTRACTED.search(line)
    if product is None or contracted is None:
        return 0.0
    left = _operand(product[1], 0, shapes)
    return 2.0 * math.prod(result) * math.prod(left[dim] for dim in _dims(contracted[1].replace('"', "")))


def _operand(operands: str, number: int, shapes: dict[str, list[int]]) -> list[int]:
    """The shape of one, which the text may say before its name."""
    return shapes[re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", operands).split(",")[number].split()[-1].lstrip("%")]


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
