"""What ``jscaler train`` does about a step that makes a loss, or a state, that is not finite: stop, skip it, or go back."""

import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jscaler.capture.wishes import no_mesh
from jscaler.errors import JobError, NotFiniteError
from jscaler.runtime.fetching import fetch
from jscaler.runtime.graph_nodes import holds_nodes

if TYPE_CHECKING:  # which needs the extra that has Orbax
    from jscaler.runtime.checkpoint import Checkpoints

MOST_RETURNS = 3  # to one state
SKIPPED = "skipped"  # the metric that says whether a step was


class OnNan(enum.StrEnum):
    """``stop`` with an error; ``skip`` the step, whose state stays as it was; ``restore`` the last checkpoint, and go on
    with the batches behind the one that did it."""

    STOP = "stop"
    SKIP = "skip"
    RESTORE = "restore"


def skipping(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step``, whose state stays as it was where the loss, or the next state, is not finite.

    Raises:
        JobError: when it is traced: its state is changed in place, or it returns no state and loss.
    """

    @functools.wraps(train_step)
    def step(state: Any, batch: Any) -> Any:
        if holds_nodes(state):
            raise JobError("--on-nan skip keeps a state that train_step returns, and this one is changed in place: restore")
        made = train_step(state, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            return made  # which is refused for what it is
        after, metrics = made
        ok = functools.reduce(jnp.logical_and, map(_is_finite, jax.tree.leaves((after, metrics))), jnp.array(True))
        named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, state), {**named, SKIPPED: ~ok}

    return step


def _is_finite(leaf: Any) -> Any:
    return jnp.isfinite(leaf).all() if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else jnp.array(True)


class NotFinite:
    """Decides, after each step of a run.

    Args:
        target: how the state lies, as `runtime.checkpoint.restore` takes it; asked for where a run goes back.
    """

    def __init__(self, choice: OnNan, checkpoints: "Checkpoints | None" = None, target: Callable[[], Any] = lambda: None):
        self.choice = choice
        self._checkpoints, self._target = checkpoints, target
        self._returns: dict[int, int] = {}

    def after(self, step: int, loss: float, state: Any, saved: bool) -> tuple[int, Any] | None:
        """Nothing, where the run goes on behind ``step``; else the number of steps taken by another state, and that state.

        Args:
            state: that which the step has left, looked at where it is to be ``saved``: a gradient may not be finite.

        Raises:
            NotFiniteError: the loss or the state is not finite, and the run is to stop, has nothing to go back to, or has
                gone back to the same state before, again and again.
        """
        if self.choice is OnNan.SKIP:
            return None
        if math.isfinite(loss) and not (saved and not is_finite(state)):
            return None
        what = (
            f"the loss of step {step} is {loss}"
            if not math.isfinite(loss)
            else f"the state behind step {step} is not finite"
        )
        found = self._checkpoints.back(self._target()) if self.choice is OnNan.RESTORE and self._checkpoints else None
        if found is None:
            raise NotFiniteError(f"{what}; {self._remedy}")
        self._returns[found[0]] = self._returns.get(found[0], 0) + 1
        if self._returns[found[0]] > MOST_RETURNS:
            again = f"as something was {MOST_RETURNS} times behind the state after {found[0]} steps"
            raise NotFiniteError(f"{what}, {again}; {self._remedy}")
        return found

    @property
    def _remedy(self) -> str:
        last = self._checkpoints.latest if self._checkpoints is not None else None
        kept = f"this run's last state is that after {last} steps; " if last is not None else ""
        return f"{kept}JAX_DEBUG_NANS=1 names the op that makes it, and --on-nan skip or restore goes on"


def is_finite(state: Any) -> bool:
    """Whether all numbers of a state are finite, on whatever devices; all processes call it."""
    groups: dict[Any, list[Any]] = {}
    for leaf in jax.tree.leaves(state):
        groups.setdefault(frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else None, []).append(leaf)
    with no_mesh():
        # one after the other: on CPUs two programs of several processes at once take each other's numbers
        found = [jax.block_until_ready(_all_finite(leaves)) for leaves in groups.values()]
        return all(map(np.all, fetch(found)))


@jax.jit
def _all_finite(leaves: list[Any]) -> Any:
    return functools.reduce(jnp.logical_and, map(_is_finite, leaves))
