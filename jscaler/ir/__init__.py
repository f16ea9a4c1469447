"""What flows through jscaler: tensors, masks, ops and the graph. Reads `text` alone."""

from jscaler.ir.graph import GradientCall, Graph
from jscaler.ir.loop import Carry, Loop, Nest, Stacked, flat, nested
from jscaler.ir.mask import Mask, Share
from jscaler.ir.op import Body, Op, VTensor
from jscaler.ir.place import Place
from jscaler.ir.rule import Factor, FactorNames, Halo, Rule
from jscaler.ir.tensor import PTensor

__all__ = [
    "Body",
    "Carry",
    "Factor",
    "FactorNames",
    "GradientCall",
    "Graph",
    "Halo",
    "Loop",
    "Mask",
    "Nest",
    "Op",
    "PTensor",
    "Place",
    "Rule",
    "Share",
    "Stacked",
    "VTensor",
    "flat",
    "nested",
]
