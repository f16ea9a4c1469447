"""A mixed-integer linear program, built row by row, and solved by HiGHS; what the solver says is checked."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from jscaler.errors import PlanError

TOLERANCE = 1e-6  # of rows and of whole numbers
Terms = Mapping[int, float]  # variable -> coefficient
Row = tuple[Terms, float, float]  # a sum of them, and between what it lies


class TimeIsOverError(Exception):
    """The solver has found nothing in its time."""


class UnprovedError(PlanError):
    """No plan was found, and there may be one all the same.

    Attributes:
        bound: seconds that it is not below.
    """

    def __init__(self, message: str, bound: float):
        super().__init__(message)
        self.bound = bound


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        values: of each variable.
        objective: of these values.
        bound: no solution has less.
        proved: whether the two meet, within the gap that was asked for.
    """

    values: np.ndarray
    objective: float
    bound: float
    proved: bool

    def takes(self, variable: int) -> bool:
        """Whether a choice is taken."""
        return bool(self.values[variable] > 0.5)


@dataclass
class Linear:
    """Variables between 0 and 1, whose weighted sum is to be least, and rows between bounds."""

    costs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: float = 0.0, whole: bool = False) -> int:
        """A new variable; ``whole`` ones are 0 or 1."""
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, terms: Terms, least: float = -math.inf, most: float = math.inf) -> None:
        """The sum of ``terms`` lies between these."""
        self.rows.append((terms, least, most))

    def one_of(self, variables: Iterable[int]) -> None:
        """Exactly one is taken."""
        self.row(dict.fromkeys(variables, 1.0), 1.0, 1.0)

    def solve(self, seconds: float, gap: float, whole: bool = True) -> Solution | None:
        """The best within ``seconds``, by one thread; None where there is no solution.

        Args:
            gap: within which a solution is the best.
            whole: whether variables that are to be whole are.

        Raises:
            TimeIsOverError: before any was found.
            PlanError: the solver's answer is none.
        """
        costs = np.array(self.costs)
        scale = 1e3 / max(float(np.abs(costs).sum()), 1e-300) * len(costs)
        columns = [column for terms, _, _ in self.rows for column in terms]
        numbers = [n for n, (terms, _, _) in enumerate(self.rows) for _ in terms]
        entries = [value for terms, _, _ in self.rows for value in terms.values()]
        least, most = (np.array([row[i] for row in self.rows]) for i in (1, 2))
        matrix = csr_array((entries, (numbers, columns)), shape=(len(self.rows), len(costs)))
        found = milp(
            costs * scale,
            constraints=LinearConstraint(matrix, least, most) if self.rows else None,  # type: ignore[arg-type]
            integrality=np.array(self.whole, int) * whole,
            bounds=Bounds(0.0, 1.0),
            options={"time_limit": min(seconds, 1e9), "mip_rel_gap": gap},
        )
        if found.x is None:
            if found.status == 2:
                return None
            raise TimeIsOverError(found.message)
        values = np.where(self.whole, np.round(found.x), found.x) if whole else found.x
        self._check(found.x, values, matrix, least, most)
        objective = float(costs @ values)
        dual = objective if not whole or found.mip_dual_bound is None else float(found.mip_dual_bound) / scale
        return Solution(values, objective, min(dual, objective), found.status == 0)

    def _check(self, raw: np.ndarray, values: np.ndarray, matrix: csr_array, least: np.ndarray, most: np.ndarray) -> None:
        """Raises PlanError where ``values`` are no solution: some solvers have called such ones optimal."""
        sums = matrix @ values
        size = 1 + abs(matrix).sum(axis=1).ravel()  # of the numbers that a row adds up
        off = max(float(np.max((sums - most) / size, initial=0)), float(np.max((least - sums) / size, initial=0)))
        part = float(np.abs(raw - values)[self.whole].max(initial=0.0))
        if off > TOLERANCE or part > 1e-4:
            raise PlanError(f"the solver's answer breaks a row by {off:.2g}, and whole numbers by {part:.2g}")
