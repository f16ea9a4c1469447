"""Kinds of GPUs by their data sheets: what a compiler asks of one, what it computes and holds.

Cores, memory, caches and FLOP/s are those of NVIDIA's data sheets of the SXM boards (docs/clusters.md lists them);
``memory`` is what the driver reports on such a board, a little less or more than its name says.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jscaler.errors import DeviceError, UnknownNameError


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products, dense, by the type of their operands; ``float32`` outside of matrix units.

    Attributes:
        tensorfloat32: what XLA makes of a float32 product at JAX's default precision; 0 where the device has none.
        bfloat16: 0 where a product of bfloat16 is computed in float32.
    """

    float64: float
    float32: float
    tensorfloat32: float
    float16: float
    bfloat16: float
    float8: float = 0.0

    def of(self, dtype: str) -> float:
        """FLOP/s of a product whose operands are of type ``dtype``, at JAX's default precision.

        Example:
            >>> DEVICE_KINDS["V100-32GB"].peak.of("bfloat16") == DEVICE_KINDS["V100-32GB"].peak.float32
            True
        """
        if dtype.startswith("float8"):
            return self.float8 or self.of("bfloat16")
        fastest = {"float64": self.float64, "float16": self.float16, "bfloat16": self.bfloat16}
        return fastest.get(dtype, self.tensorfloat32) or self.float32


@dataclass(frozen=True)
class Reached:
    """What programs have been seen to reach of a device's peaks and of its links (docs/clusters.md has the sources).

    Attributes:
        products: FLOP/s of large matrix products.
        half: FLOPs of a product that runs at half of that: tiles and waves that are not full, and its start.
        bandwidth: of the memory, where kernels go over all of a large tensor, bytes per second.
        launch: seconds from one kernel to the next.
        inside, between: the parts of the bandwidths of links inside a host and between hosts.
    """

    products: Peak
    half: float
    bandwidth: float
    launch: float
    inside: float
    between: float


@dataclass(frozen=True)
class DeviceKind:
    """A GPU, as XLA's compiler and the cost model know it.

    Attributes:
        name: as in ``8xH100-80GB``.
        description: the name that the driver reports.
        capability: CUDA compute capability, major and minor.
        num_cores: streaming multiprocessors, each with ``fpus_per_core`` float32 units, ``threads_per_core`` threads at
            most and ``shared_per_core`` bytes of shared memory, of which one block may take ``shared_per_block`` when it
            asks for it.
        memory: bytes that the driver offers to programs.
        bandwidth: of the memory, bytes per second.
        l2_cache: bytes.
        clock: boost clock, GHz.
        peak: FLOP/s by type.
        reached: what of this is reached; None where seconds are bounds, by the peaks.
    """

    name: str
    description: str
    capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    shared_per_core: int
    shared_per_block: int
    memory: int
    bandwidth: float
    l2_cache: int
    clock: float
    peak: Peak
    threads_per_core: int = 2048
    reached: Reached | None = None

    def __str__(self) -> str:
        return self.name

    def product_seconds(self, flops: float, dtype: str) -> float:
        """Of one product whose operands are of type ``dtype``."""
        if self.reached is None:
            return flops / self.peak.of(dtype)
        return (flops + self.reached.half) / self.reached.products.of(dtype)

    def kernel_seconds(self, flops: Iterable[tuple[str, float]], nbytes: float) -> float:
        """Of a kernel that computes, and meanwhile reads and writes ``nbytes`` (the roofline).

        Args:
            flops: operations by unit: the dtype of a product's operands, or ``vector``.

        Example:
            >>> v100, ten = DEVICE_KINDS["V100-32GB"], [("float16", 1e10)]
            >>> v100.kernel_seconds(ten, 0) < v100.as_reached().kernel_seconds(ten, 0)
            True
        """
        known = [(n / self.peak.float32 if unit == "vector" else self.product_seconds(n, unit)) for unit, n in flops]
        bandwidth, launch = (self.bandwidth, 0.0) if self.reached is None else (self.reached.bandwidth, self.reached.launch)
        return max(sum(known), nbytes / bandwidth) + launch

    def as_reached(self) -> "DeviceKind":
        """The same, whose seconds are not bounds but what has been seen; raises DeviceError where nobody has looked."""
        if self.reached is None and self.name not in REACHED:
            raise DeviceError(f"no figures are known of what {self.name} reaches; known: {', '.join(REACHED)}")
        return self if self.reached is not None else replace(self, reached=REACHED[self.name])


# fmt: off
_VOLTA = ((7, 0), 80, 64, 96 << 10, 96 << 10)
_AMPERE = ((8, 0), 108, 64, 164 << 10, 163 << 10)
_HOPPER = ((9, 0), 132, 128, 228 << 10, 227 << 10)
#                  float64  float32  tf32     float16   bfloat16  float8
_V100_PEAK = Peak(7.8e12, 15.7e12, 0.0, 125e12, 0.0)
_A100_PEAK = Peak(19.5e12, 19.5e12, 156e12, 312e12, 312e12)
_H100_PEAK = Peak(67e12, 67e12, 494.7e12, 989.4e12, 989.4e12, 1978.9e12)
DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("V100-16GB", "Tesla V100-SXM2-16GB", *_VOLTA, 16_935_682_048, 900e9, 6 << 20, 1.53, _V100_PEAK),
        DeviceKind("V100-32GB", "Tesla V100-SXM3-32GB", *_VOLTA, 34_089_730_048, 900e9, 6 << 20, 1.53, _V100_PEAK),
        DeviceKind("A100-40GB", "NVIDIA A100-SXM4-40GB", *_AMPERE, 42_298_834_944, 1555e9, 40 << 20, 1.41, _A100_PEAK),
        DeviceKind("A100-80GB", "NVIDIA A100-SXM4-80GB", *_AMPERE, 85_100_068_864, 2039e9, 40 << 20, 1.41, _A100_PEAK),
        DeviceKind("H100-80GB", "NVIDIA H100 80GB HBM3", *_HOPPER, 84_929_347_584, 3352.32e9, 50 << 20, 1.98, _H100_PEAK),
        DeviceKind("H200-141GB", "NVIDIA H200", *_HOPPER, 151_397_597_184, 4800e9, 50 << 20, 1.98, _H100_PEAK),
    )
}
_V100_REACHED = Peak(7.0e12, 14e12, 0.0, 95e12, 0.0)
_A100_REACHED = Peak(17.4e12, 17.4e12, 116e12, 230e12, 230e12)
REACHED = {
    "V100-16GB": Reached(_V100_REACHED, 1e9, 784e9, 4.3e-6, 0.87, 0.88),
    "V100-32GB": Reached(_V100_REACHED, 1e9, 784e9, 4.3e-6, 0.87, 0.88),
    "A100-80GB": Reached(_A100_REACHED, 1e9, 1616e9, 4.3e-6, 0.77, 0.88),
}
# fmt: on


def find_kind(name: str, where: str = "") -> DeviceKind:
    """A built-in kind by its name, or by the part before the memory where only one begins so: ``H100``.

    Args:
        name: ``H100-80GB``.
        where: what the error says of the place that holds the name.

    Raises:
        UnknownNameError: no kind is named so, or several are.
    """
    begun = [kind for known, kind in DEVICE_KINDS.items() if known == name or known.partition("-")[0] == name]
    if len(begun) != 1:
        raise UnknownNameError("device kind", name, DEVICE_KINDS, where)
    return begun[0]


def kind_of(description: str) -> DeviceKind | None:
    """The built-in kind that a driver describes so (``device.device_kind`` of JAX); None where it is none of them.

    Example:
        >>> str(kind_of("Tesla V100-SXM2-32GB")), kind_of("cpu")
        ('V100-32GB', None)
    """
    every = DEVICE_KINDS.values()
    exact = (kind for kind in every if kind.description == description)
    parts = "MIG" in description  # of a device, which are less
    by_words = (kind for kind in every if not parts and all(word in description for word in kind.name.split("-")))
    return next(exact, None) or next(by_words, None)
