"""Parts from device to device, some of them as between processes: each receiver has its sender's."""

import functools
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jscaler.runtime.absent import absent, is_absent, zeros
from jscaler.runtime.process_messages import Messages
from jscaler.runtime.spreading import brought_home, spread, spread_structs

DEVICES = jax.devices()
KNOWN: dict[Any, Any] = {}  # equal rounds are compiled once for all examples


@functools.cache
def parts(shape: tuple[int, ...], dtype: str) -> dict[Any, jax.Array]:
    """Of every device another one."""
    numbers = np.arange(len(DEVICES) * max(1, int(np.prod(shape)))).reshape(len(DEVICES), *shape)
    keys = jax.vmap(jax.random.key)(numbers.ravel()).reshape(numbers.shape) if dtype == "key" else numbers.astype(dtype)
    return {device: jax.device_put(keys[i], device) for i, device in enumerate(DEVICES)}


def words(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@settings(max_examples=25, deadline=None)
@given(
    senders=st.lists(st.none() | st.integers(0, 3), min_size=4, max_size=4),
    per_process=st.sampled_from([1, 2]),
    kind=st.sampled_from([((), "float32"), ((3,), "bool"), ((2, 2), "bfloat16"), ((), "key")]),
)
def test_every_receiver_has_the_part_of_its_sender(
    senders: list[int | None], per_process: int, kind: tuple[tuple[int, ...], str]
) -> None:
    """Of four devices, one or two to a process; one may send to several, and to itself."""
    given = parts(*kind)
    pairs = [(DEVICES[a], DEVICES[b]) for b, a in enumerate(senders) if a is not None]
    dtype = given[DEVICES[0]].dtype
    came = Messages(pairs, kind[0], dtype, KNOWN, process=lambda device: device.id // per_process)(given)
    assert came.keys() == {b for _, b in pairs}
    for sender, receiver in pairs:
        assert came[receiver].devices() == {receiver}
        np.testing.assert_array_equal(words(came[receiver]), words(given[sender]))


def test_arrays_that_lie_elsewhere_have_the_types_that_a_program_there_would_return() -> None:
    count, key = jax.jit(lambda: 0)(), jax.random.key(0)
    avals = [count.aval, key.aval, jax.ShapeDtypeStruct((2, 3), "bfloat16")]
    here = jax.sharding.SingleDeviceSharding(DEVICES[1])
    made = absent(avals, [here] * 3)
    assert [(x.shape, x.dtype) for x in made] == [((), np.int32), ((), key.dtype), ((2, 3), jax.numpy.bfloat16)]
    assert (made[0].weak_type, made[2].weak_type) == (True, False)
    assert zeros(avals[2]).dtype == jax.numpy.bfloat16
    assert not is_absent(here)


def test_alone_nothing_is_spread() -> None:
    state = {"a": jax.numpy.ones(3)}
    assert spread(state) is state is brought_home(state, state) is spread_structs(state)
