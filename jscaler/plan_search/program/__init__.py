"""The integer program inside one device group: how each op is split, how each parameter lies, what is computed again."""

from jscaler.plan_search.program.fill import Filled, NothingFitsError, fill
from jscaler.plan_search.program.linear import UnprovedError

__all__ = ["Filled", "NothingFitsError", "UnprovedError", "fill"]
