"""OR-Tools' CP-SAT: its import, and one way to run it that gives equal results for equal inputs."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jscaler.errors import JscalerError


def cp_sat() -> ModuleType:
    """OR-Tools' module of CP-SAT.

    Raises:
        JscalerError: OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise JscalerError(
            'a schedule search needs OR-Tools, which is not installed: pip install "jscaler[search]"'
        ) from None
    return cp_model


@dataclass(frozen=True)
class Answer:
    """What the solver says of a model.

    Attributes:
        values: of its variables, for `value`; None where it found no solution.
        objective: of these values; 0 where the model has none.
        bound: no solution has a lower objective.
        closed: whether nothing is left to search: the solution is optimal, or there is none.
        spent: deterministic seconds that the search took.
    """

    values: Any
    objective: float
    bound: float
    closed: bool
    spent: float

    def value(self, expression: Any) -> int:
        """Of a variable or an expression."""
        return self.values.value(expression)


def run(model: Any, seconds: float, seed: int, *, linear: bool = True) -> Answer:
    """Solve ``model`` on one core.

    Args:
        model: a ``CpModel``.
        seconds: deterministic time, which the solver counts in steps of its search; about as long as on a clock.
        seed: of its random choices.
        linear: whether linear relaxations are worth their time; of many blocks with orders between them they are not.
    """
    cp_model = cp_sat()
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = max(seconds, 1e-3)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.symmetry_level = 0  # micro-batches are in order; and 9.15 fails on some hints of symmetric models
    if not linear:
        solver.parameters.linearization_level = 0
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    spent = solver.response_proto.deterministic_time
    return Answer(
        solver if found else None, solver.objective_value if found else 0.0, solver.best_objective_bound, closed, spent
    )
