"""Seconds and peaks of many plans for one graph, from tables that plans share; see `jscaler.estimate.prices.price`."""

from jscaler.estimate.prices.candidate import NoPriceError
from jscaler.estimate.prices.price import Price, Prices

__all__ = ["NoPriceError", "Price", "Prices"]
