"""``Profile``: seconds of programs as they were measured, in a file that estimates read in place of the model of kernels.

A program is known by its equations, shapes and types (`pieces.Piece.key`); a figure holds for one kind of device and one
version of JAX.
"""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jscaler.clusters.timing import interleaved
from jscaler.errors import DeviceError
from jscaler.estimate.pieces import Piece

VERSION = 1
Place = tuple[str, str]  # a kind of device, as the driver describes it, and a version of JAX


@dataclass
class Profile:
    """Seconds by program.

    Attributes:
        seconds: (kind of device, version of JAX) -> key of a program -> seconds of one run.
        about: key -> what it was, for people.

    Example:
        >>> found = Profile({("NVIDIA H200", jax.__version__): {"9a0f": 1.5e-3}})
        >>> found.of("9a0f", "NVIDIA H200"), found.of("9a0f", "NVIDIA H100 80GB HBM3")
        (0.0015, None)
    """

    seconds: dict[Place, dict[str, float]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def of(self, key: str, device: str) -> float | None:
        """Seconds of one run on a kind of device under the JAX of this process; None where nobody has measured it."""
        return self.seconds.get((device, jax.__version__), {}).get(key)

    def add(self, piece: Piece, device: str, seconds: float) -> None:
        self.seconds.setdefault((device, jax.__version__), {})[piece.key] = seconds
        self.about[piece.key] = piece.about

    def save(self, path: Path) -> None:
        """Write the file that `load_profile` reads; raises OSError where that cannot be."""
        places = [{"device": d, "jax": j, "seconds": own} for (d, j), own in sorted(self.seconds.items())]
        path.write_text(json.dumps({"version": VERSION, "places": places, "about": self.about}, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """Read a file that `Profile.save` has written.

    Raises:
        DeviceError: it cannot be read, or is no profile.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            raise ValueError(f"its version is {record['version']}, and {VERSION} is read")
        seconds = {
            (str(one["device"]), str(one["jax"])): {str(key): float(value) for key, value in one["seconds"].items()}
            for one in record["places"]
        }
        wrong = [
            f"{key}: {value}"
            for programs in seconds.values()
            for key, value in programs.items()
            if not 0 < value < math.inf
        ]
        if wrong:
            raise ValueError(f"seconds of a run are positive numbers, not {wrong[0]}")
        return Profile(seconds, {str(key): str(what) for key, what in record["about"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeviceError(
            f"cannot read the profile {path}: {type(error).__name__} {error}; `jscaler profile --out {path}` writes one"
        ) from None


def measure_piece(piece: Piece, device: Any, rounds: int) -> float:
    """Seconds of one run, without what calling any program of as many operands takes: medians of ``rounds``."""
    with jax.default_device(device):
        given = [_filled(struct, number) for number, struct in enumerate(piece.inputs)]
        program, nothing = jax.jit(piece.run), jax.jit(lambda *args: args[:0])
        first, second = interleaved([lambda: program(*given), lambda: nothing(*given)], rounds)
    return max(statistics.median(first) - statistics.median(second), 1e-7)


def _filled(struct: jax.ShapeDtypeStruct, number: int) -> jax.Array:
    """Numbers about 0, of which no product grows; zeros of what counts or is true, so that indices are legal."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        found: list[Any] = []
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
        key = jax.random.key(number, impl=found[0])
        return jax.random.split(key, struct.shape) if struct.shape else key
    key = jax.random.key(number)
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return (jax.random.normal(key, struct.shape) / 16).astype(struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def missing(pieces: Iterable[Piece], profile: Profile, device: str) -> list[Piece]:
    """One of each program that the profile has no figure of, in order; of those that can be run by themselves."""
    found = {p.key: p for p in pieces if profile.of(p.key, device) is None and p.runs_alone}
    return list(found.values())
