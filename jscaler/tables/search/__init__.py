"""Schedule search: tables for given blocks, of least step time within each device's memory, with a proven bound.

Needs ``pip install "jscaler[search]"``.
"""

from jscaler.tables.search.chain_problem import StageCosts, chain_problem, unit_costs
from jscaler.tables.search.problem import Edge, Problem, SearchBlock
from jscaler.tables.search.result import FoundSchedule
from jscaler.tables.search.schedule_search import search_schedule
from jscaler.tables.search.tessel import TESSEL_SHAPES, tessel_problem

__all__ = [
    "TESSEL_SHAPES", "Edge", "FoundSchedule", "Problem", "SearchBlock", "StageCosts", "chain_problem", "search_schedule",
    "tessel_problem", "unit_costs",
]  # fmt: skip
