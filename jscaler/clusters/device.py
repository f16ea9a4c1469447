"""Kinds of GPUs by their data sheets: what a compiler asks of one, what it computes and holds.

Cores, memory, caches and FLOP/s are those of NVIDIA's data sheets of the SXM boards (docs/clusters.md lists them);
``memory`` is what the driver reports on such a board, a little less or more than its name says.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jscaler.errors import UnknownNameError


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products, dense, by the type of their operands; ``float32`` outside of matrix units.

    Attributes:
        tensorfloat32: what XLA makes of a float32 product at JAX's default precision; 0 where the device has none.
        bfloat16: 0 where a product of bfloat16 is computed in float32.
        int8: of integers of 8 bits; 0 where nobody says, and they count as bfloat16.
    """

    float64: float
    float32: float
    tensorfloat32: float
    float16: float
    bfloat16: float
    float8: float = 0.0
    int8: float = 0.0

    def of(self, dtype: str) -> float:
        """FLOP/s of a product whose operands are of type ``dtype``, at JAX's default precision.

        Example:
            >>> DEVICE_KINDS["V100-32GB"].peak.of("bfloat16") == DEVICE_KINDS["V100-32GB"].peak.float32
            True
        """
        if dtype.startswith("float8"):
            return self.float8 or self.of("bfloat16")
        if dtype in ("int8", "uint8"):
            return self.int8 or self.of("bfloat16")
        fastest = {"float64": self.float64, "float16": self.float16, "bfloat16": self.bfloat16}
        return fastest.get(dtype, self.tensorfloat32) or self.float32


@dataclass(frozen=True)
class Reached:
    """What programs have been seen to reach of a device's peaks and of its links (docs/clusters.md has the sources).

    Attributes:
        products: FLOP/s of matrix products that fill the device.
        bandwidth: of the memory, where kernels go over all of a large tensor, bytes per second.
        launch: seconds from one kernel to the next.
        inside, between: the parts of the bandwidths of links inside a host and between hosts.
        half_row: elements of a row at which a kernel that holds it as a whole has half of the bandwidth.
        interference: how many times as long arithmetic takes beside a collective or a copy; 1 where nobody says.
    """

    products: Peak
    bandwidth: float
    launch: float
    inside: float
    between: float
    half_row: float = 11_000.0
    interference: float = 1.0


# Rows and columns of a product that one core makes at a time, and how much of its rate it has then. Larger tiles read less.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
SHORTEST = 256  # elements of what is contracted, below which no kernel divides it among cores
INTEGER_LANES = 64  # of a core, from Volta to Hopper (CUDA C++ Programming Guide, throughput of arithmetic instructions)


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
        reached: what of this is reached; None where that is not known, and seconds are bounds, by the peaks.
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

    def product_seconds(self, flops: float, dtype: str, sizes: tuple[int, ...] = ()) -> float:
        """Of one product whose operands are of type ``dtype``; ``sizes`` are its batch, rows, columns and depth."""
        if self.reached is None:
            return flops / self.peak.of(dtype)
        return flops / self.reached.products.of(dtype) / (_filled(self.num_cores, *sizes) if sizes else 1.0)

    def kernel_seconds(self, flops: Iterable[tuple[float, str, tuple[int, ...]]], nbytes: float, row: int = 0) -> float:
        """Of a kernel that computes, and meanwhile reads and writes ``nbytes`` (the roofline).

        Args:
            flops: operations, what does them (the dtype of a product's operands, ``vector``, ``integer``), and sizes of a
                product (see `product_seconds`).
            row: elements of the rows that it holds as a whole; 0 of others.

        Example:
            >>> v100, ten = DEVICE_KINDS["V100-32GB"], [(1e10, "float16", ())]
            >>> v100.at_peaks().kernel_seconds(ten, 0) < v100.kernel_seconds(ten, 0)
            True
        """
        share = 1.0 if self.reached is None else self.reached.products.float32 / self.peak.float32
        lanes = self.peak.float32 / (2 if self.reached else 1)  # a data sheet counts a multiply and an add as two
        rates = {"vector": share * lanes, "integer": share * INTEGER_LANES * self.num_cores * self.clock * 1e9}
        seconds = sum(
            n / rates[unit] if unit in rates else self.product_seconds(n, unit, sizes) for n, unit, sizes in flops
        )
        bandwidth, launch = (self.bandwidth, 0.0) if self.reached is None else (self.reached.bandwidth, self.reached.launch)
        held = 0.0 if self.reached is None else row / self.reached.half_row
        return max(seconds, nbytes / bandwidth * (1 + held)) + launch

    @property
    def has_row_kernels(self) -> bool:
        """Whether XLA makes one kernel of a softmax: it does so by Triton, from Ampere on."""
        return self.capability >= (8, 0)

    def at_peaks(self) -> "DeviceKind":
        """The same, whose seconds are bounds: nothing is faster."""
        return replace(self, reached=None)


@functools.lru_cache(maxsize=1 << 14)
def _filled(cores: int, batch: int, rows: int, columns: int, depth: int) -> float:
    """The part of the device's rate that a product of these sizes has: its tiles come in waves, one for each core, and the
    last wave and the last tiles are not full. Of the kernels that there are, the best is taken.
    """
    best = 0.0
    for high, wide, rate in TILES:
        tiles = batch * -(-rows // high) * -(-columns // wide)
        for parts in (1, 2, 4, 8, 16):
            if parts > 1 and depth < parts * SHORTEST:
                break
            waves = -(-tiles * parts // cores)
            best = max(best, rate * batch * rows * columns * parts / (waves * cores * high * wide))
    return best or 1.0


# fmt: off
_VOLTA = ((7, 0), 80, 64, 96 << 10, 96 << 10)
_AMPERE = ((8, 0), 108, 64, 164 << 10, 163 << 10)
_HOPPER = ((9, 0), 132, 128, 228 << 10, 227 << 10)
#                  float64  float32  tf32     float16   bfloat16  float8
_V100_PEAK = Peak(7.8e12, 15.7e12, 0.0, 125e12, 0.0, 0.0, 62.8e12)
_A100_PEAK = Peak(19.5e12, 19.5e12, 156e12, 312e12, 312e12, 0.0, 624e12)
_H100_PEAK = Peak(67e12, 67e12, 494.7e12, 989.4e12, 989.4e12, 1978.9e12, 1978.9e12)
#                     float64   float32   tf32    float16 bfloat16 float8
_V100_REACHED = Peak(7.0e12, 14e12, 0.0, 95e12, 0.0, 0.0, 56e12)
_A100_REACHED = Peak(17.4e12, 17.4e12, 116e12, 230e12, 230e12, 0.0, 460e12)
_H100_REACHED = Peak(60e12, 60e12, 343e12, 668e12, 668e12, 1336e12, 1336e12)
# Computation beside communication is 18.9 % slower, the mean of A100, H100, MI210 and MI250 (arXiv:2507.03114). An H200 is
# assumed to be as an H100; of V100s no figure was found.
_BESIDE = {"interference": 1.189}
_V100 = Reached(_V100_REACHED, 784e9, 2.5e-6, 0.87, 0.88)
REACHED = {
    "V100-16GB": _V100,
    "V100-32GB": _V100,
    "A100-40GB": Reached(_A100_REACHED, 1232e9, 2.5e-6, 0.77, 0.88, **_BESIDE),
    "A100-80GB": Reached(_A100_REACHED, 1616e9, 2.5e-6, 0.77, 0.88, **_BESIDE),
    "H100-80GB": Reached(_H100_REACHED, 2650e9, 2.5e-6, 0.80, 0.88, **_BESIDE),
    "H200-141GB": Reached(_H100_REACHED, 3800e9, 2.5e-6, 0.80, 0.88, **_BESIDE),
}
DEVICE_KINDS = {
    kind.name: replace(kind, reached=REACHED[kind.name])
    for kind in (
        DeviceKind("V100-16GB", "Tesla V100-SXM2-16GB", *_VOLTA, 16_935_682_048, 900e9, 6 << 20, 1.53, _V100_PEAK),
        DeviceKind("V100-32GB", "Tesla V100-SXM3-32GB", *_VOLTA, 34_089_730_048, 900e9, 6 << 20, 1.53, _V100_PEAK),
        DeviceKind("A100-40GB", "NVIDIA A100-SXM4-40GB", *_AMPERE, 42_298_834_944, 1555e9, 40 << 20, 1.41, _A100_PEAK),
        DeviceKind("A100-80GB", "NVIDIA A100-SXM4-80GB", *_AMPERE, 85_100_068_864, 2039e9, 40 << 20, 1.41, _A100_PEAK),
        DeviceKind("H100-80GB", "NVIDIA H100 80GB HBM3", *_HOPPER, 84_929_347_584, 3352.32e9, 50 << 20, 1.98, _H100_PEAK),
        DeviceKind("H200-141GB", "NVIDIA H200", *_HOPPER, 151_397_597_184, 4800e9, 50 << 20, 1.98, _H100_PEAK),
    )
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


def slowest(kinds: Iterable[DeviceKind]) -> DeviceKind:
    """Of several kinds the one with the slowest products of float16; of equal ones that with the slowest memory.

    Example:
        >>> str(slowest([find_kind("H100"), find_kind("A100-80GB"), find_kind("A100-40GB")]))
        'A100-40GB'
    """
    return min(kinds, key=lambda kind: (kind.peak.of("float16"), kind.bandwidth, kind.name))


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
