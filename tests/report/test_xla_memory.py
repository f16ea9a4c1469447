"""Memory of a device by kind: what must be there, and that all of it adds up to what XLA reserves."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from report.stand_in import LAYERS, ROWS, WIDTH, arguments, on_cpu, step

import jscaler
from jscaler.estimate.memory import MEMORY_KINDS, Memory
from jscaler.report.target_report import TargetReport
from jscaler.report.xla_memory import hlo_shape

STATE = 4 * (LAYERS * WIDTH * WIDTH + WIDTH * 8)


@pytest.fixture(scope="module")
def report() -> Iterator[TargetReport]:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        lowered = jscaler.parallelize("data_parallel", devices=4, donate_argnums=0)(step).lower(*arguments())
        yield lowered.compile(target="2x2xH100-80GB")


@pytest.mark.smoke
def test_state_and_gradients_lie_whole_on_every_device(report: TargetReport) -> None:
    memory = report.memory
    assert (memory.parameters, memory.optimizer) == (STATE, STATE)
    assert memory.gradients >= STATE - 4 * WIDTH * 8  # all but the head's, which may be used up by then
    assert ROWS // 4 * WIDTH * 4 <= memory.inputs < ROWS // 4 * WIDTH * 4 + 64  # and constants
    assert memory.activations > 0


@pytest.mark.smoke
def test_everything_adds_up_to_what_xla_reserves(report: TargetReport) -> None:
    memory, stats = report.memory, report.memory_analysis()
    reserved = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert 0 <= memory.peak - reserved - stats.temp_size_in_bytes < 64  # constants
    for kind in MEMORY_KINDS:
        assert sum(c.nbytes for c in report.contributors if c.kind == kind) == getattr(memory, kind)
    assert memory.capacity == 84_929_347_584
    assert memory.fits
    assert memory.headroom == memory.capacity - memory.peak


def test_contributors_name_the_user_s_lines(report: TargetReport) -> None:
    found = {c.op: c for c in report.contributors}
    kernel = found["state/params/layers"]
    assert (kernel.kind, kernel.shape) == ("parameters", f"f32[{LAYERS},{WIDTH},{WIDTH}]")
    assert kernel.nbytes == 4 * LAYERS * WIDTH**2
    gradients = [c for c in report.contributors if c.kind == "gradients" and c.shape == kernel.shape]
    assert gradients
    for gradient in gradients:
        assert "layer" in gradient.op
        assert gradient.source.partition(":")[0].endswith("stand_in.py")
    saved = [c for c in report.contributors if c.kind == "activations" and c.shape == f"f32[{LAYERS},{ROWS // 4},{WIDTH}]"]
    assert saved, "what the forward loop saves for its backward"
    sizes = [c.nbytes for c in report.contributors]
    assert sizes == sorted(sizes, reverse=True)


def test_not_donated_state_takes_its_memory_twice(report: TargetReport, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    kept = jscaler.parallelize("data_parallel", devices=4)(step).lower(*arguments()).compile(target="4xH100").memory
    assert kept.outputs >= 2 * STATE > report.memory.outputs
    assert kept.parameters == STATE


def test_a_device_that_is_too_small() -> None:
    memory = Memory(*([10] * len(MEMORY_KINDS)), capacity=60)
    assert (memory.peak, memory.headroom, memory.fits) == (70, -10, False)
    assert memory.as_json() | {"peak": 70, "fits": False} == memory.as_json()


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint16",
        "int32",
        "bfloat16",
        "float16",
        "float32",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_shapes_as_hlo_writes_them(dtype: str) -> None:
    text = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((2, 3), dtype)).compile().as_text()
    assert text is not None
    assert f"{hlo_shape((2, 3), jnp.dtype(dtype))}{{1,0}} parameter(0)" in text


def test_a_key_is_two_words() -> None:
    key = jax.eval_shape(jax.random.key, 0)
    assert hlo_shape(key.shape, key.dtype) == "u32[2]"
