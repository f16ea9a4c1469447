"""Floating-point operations of an executable's products, each as often as it runs.

XLA's own count takes a loop's body once, and what a CUDA library multiplies not at all. This one reads the optimized HLO:
products stand there as ``dot`` or as calls of cuBLAS, and `jscaler.report.hlo_loops` knows how often a line runs. What is
computed again in a backward counts again.
"""

import math
import re

from jscaler.report.hlo_loops import times

_MADE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]")
_PRODUCT = re.compile(r"\b(?:dot|custom-call)\(([^)]*)\)")
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([^\]}]*)[\]}]')


def dot_flops(text: str) -> float:
    """2·b·m·n·k of every product in an optimized HLO text, over all iterations of its loops.

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
    product, contracted = _PRODUCT.search(line), _CONTRACTED.search(line)
    if product is None or contracted is None:
        return 0.0
    left = shapes[product[1].split(",")[0].split()[-1].lstrip("%")]
    return 2.0 * math.prod(result) * math.prod(left[dim] for dim in _dims(contracted[1].replace('"', "")))


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
