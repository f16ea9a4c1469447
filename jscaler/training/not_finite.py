"""What ``jscaler train`` does about a step that makes a loss, or a state, that is not finite: stop, skip it, or go back."""

import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from jscaler.capture.names import leaf_names
from jscaler.capture.wishes import no_mesh
from jscaler.errors import JobError, NotFiniteError, listing
from jscaler.runtime.chunked_array import arrays_of
from jscaler.runtime.fetching import fetch
from jscaler.runtime.graph_nodes import holds_nodes

if TYPE_CHECKING:  # which needs the extra that has Orbax
    from jscaler.runtime.checkpoint import Checkpoints

MOST_RETURNS = 3  # to one state
MOST_SKIPS = 100  # in a row
SKIPPED = "skipped"  # the metric that says whether a step was


class OnNan(enum.StrEnum):
    """``stop`` with an error; ``skip`` the step, whose state stays as it was; ``restore`` the last checkpoint, and go on
    with the batches behind the one that did it."""

    STOP = "stop"
    SKIP = "skip"
    RESTORE = "restore"


def skipping(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step``, whose state stays as it was where the loss, or a number of the next state, is not finite any more.

    A number that was not finite before, such as the best loss so far of a state that has seen none, is no reason.

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
        named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
        stays = jax.tree.leaves(jax.tree.map(_stays_finite, after, state))
        good = [*map(_is_finite, jax.tree.leaves(named.get("loss"))), *stays]
        ok = functools.reduce(jnp.logical_and, good, jnp.array(True))
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, state), {**named, SKIPPED: ~ok}

    return step


def _is_finite(leaf: Any) -> Any:
    return _stays_finite(leaf, 0.0)


def _stays_finite(after: Any, before: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(after), jnp.inexact):
        return jnp.array(True)
    return (jnp.isfinite(after) | ~jnp.isfinite(before)).all()


class NotFinite:
    """Decides, after each step of a run.

    Args:
        target: how the state lies, as `runtime.checkpoint.restore` takes it; asked for where a run goes back.
        state: that which the run begins with; what is not finite in it already, an update may leave so.
    """

    def __init__(
        self,
        choice: OnNan,
        checkpoints: "Checkpoints | None" = None,
        target: Callable[[], Any] = lambda: None,
        state: Any = None,
    ):
        self.choice = choice
        self._checkpoints, self._target = checkpoints, target
        self._returns: dict[int, int] = {}
        self._skips = 0  # in a row
        looks = checkpoints is not None and choice is not OnNan.SKIP
        self._before = not_finite(state) if looks else dict[str, int]()

    def gives_up(self, skipped: bool) -> bool:
        """Whether a run is to end behind this step, with its state saved, because all are ``skipped``."""
        self._skips = self._skips + 1 if skipped else 0
        return self._skips >= MOST_SKIPS

    def end(self, step: int) -> NoReturn:
        """Raises NotFiniteError, where it `gives_up`."""
        told = f"{MOST_SKIPS} steps in a row were skipped, up to step {step}: none has a finite loss and state any more"
        raise NotFiniteError(f"{told}; {self._kept}JAX_DEBUG_NANS=1 names the op, a lower learning rate may help")

    def after(self, step: int, loss: float, state: Any, saved: bool) -> str:
        """What is not finite behind ``step``, in words, where the run is to go `back`; "" where it goes on.

        Args:
            state: that which the step has left, looked at where it is to be ``saved``: a gradient may not be finite.

        Raises:
            NotFiniteError: the loss or the state is not finite, and the run is to stop.
        """
        if self.choice is OnNan.SKIP:
            return ""
        what = "" if math.isfinite(loss) else f"the loss of step {step} is {loss}"
        if not what and saved and (found := [n for n, bad in not_finite(state).items() if bad > self._before.get(n, 0)]):
            what = f"the state behind step {step} is not finite, in {listing(found)}"
        if what and (self.choice is OnNan.STOP or self._checkpoints is None):
            raise NotFiniteError(f"{what}; {self._remedy}")
        return what

    def back(self, what: str) -> tuple[int, Any]:
        """The number of steps taken by the latest checkpoint's state, and that state.

        Args:
            what: is not finite, in words.

        Raises:
            NotFiniteError: there is none, or the run has gone back to it before, again and again.
        """
        found = self._checkpoints.back(self._target()) if self._checkpoints is not None else None
        if found is None:
            raise NotFiniteError(f"{what}; {self._remedy}")
        self._returns[found[0]] = self._returns.get(found[0], 0) + 1
        if self._returns[found[0]] > MOST_RETURNS:
            again = f"as something was {MOST_RETURNS} times behind the state after {found[0]} steps"
            raise NotFiniteError(f"{what}, {again}; {self._remedy}")
        return found

    @property
    def _kept(self) -> str:
        last = self._checkpoints.latest if self._checkpoints is not None else None
        return f"this run's last state is that after {last} steps; " if last is not None else ""

    @property
    def _remedy(self) -> str:
        return f"{self._kept}JAX_DEBUG_NANS=1 names the op that makes it, and --on-nan skip or restore goes on"


def not_finite(state: Any) -> dict[str, int]:
    """How many numbers are not finite in each leaf of a state that has such, on whatever devices; all processes call it."""
    of_leaf = [(number, array) for number, leaf in enumerate(jax.tree.leaves(state)) for array in arrays_of(leaf)]
    leaves, groups = [array for _, array in of_leaf], dict[Any, list[int]]()
    for number, leaf in enumerate(leaves):
        where = frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else None
        groups.setdefault(where, []).append(number)
    with no_mesh():
        # one after the other: on CPUs two programs of several processes at once take each other's numbers
        found = [jax.block_until_ready(_counts([leaves[n] for n in numbers])) for numbers in groups.values()]
        counts = [int(count) for group in fetch(found) for count in group]
    known = Counter[int]()
    for number, count in zip((n for numbers in groups.values() for n in numbers), counts, strict=True):
        known[of_leaf[number][0]] += count
    return {name: known[number] for number, name in enumerate(leaf_names("state", state)) if known[number]}


@jax.jit
def _counts(leaves: list[Any]) -> Any:
    inexact = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    return jnp.stack([jnp.sum(~jnp.isfinite(x)) if is_number else 0 for x, is_number in zip(leaves, inexact, strict=True)])
