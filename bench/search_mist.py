"""Plans that Mist's authors tuned, as plans of jscaler.

They are those of https://github.com/Dazz993/Mist, ``benchmark/mist/tuned_configs`` (Zhu et al., EuroSys 2025), for GPT and
LLaMA of 7B and 22B on A100 and L4. Where they hold a part of the optimizer's state or of activations in host memory, that
part is left out here: it takes no time then, and their plan may not fit.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from bench.paper_models import Model
from jscaler.clusters import Cluster, DeviceKind, Link, Peak, find_cluster

SEVEN = (("hidden", 4096), ("layers", 32), ("heads", 32))
TWENTY_TWO = (("hidden", 6144), ("layers", 48), ("heads", 64))
WORDS = ("vocabulary", 50304)


@dataclass(frozen=True)
class Tuned:
    """A plan of theirs.

    Attributes:
        devices: their kind, and how many.
        stages: of each its layers, how many of these are computed again, and its ZeRO.
        offloads: whether a part is in host memory.
    """

    model: Model
    devices: tuple[str, int]
    microbatches: int
    dp: int
    tp: int
    stages: Sequence[tuple[int, int, int]]
    offloads: bool = False

    @property
    def text(self) -> str:
        """As a plan."""
        plans = [self._plan(*stage) for stage in self.stages]
        layers = [count for count, *_ in self.stages]
        return f"pipeline({len(plans)}, {self.microbatches}, plan=[{', '.join(plans)}], layers={layers})"

    def _plan(self, layers: int, again: int, zero: int) -> str:
        inside = f"megatron(dp={self.dp}, tp={self.tp}, zero={zero})"
        some = "" if again == layers else f", layers={again}"
        return f"recompute_layers({inside}{some})" if again else inside

    @property
    def cluster(self) -> Cluster:
        """The devices that it was tuned for."""
        kind, count = self.devices
        return l4s(count) if kind == "L4-24GB" else find_cluster(f"{max(1, count // 8)}x8x{kind}")


def l4s(count: int) -> Cluster:
    """Hosts of eight L4: peaks of NVIDIA's data sheet, of which as much is reached as of an A100's; PCIe 4.0 x16 within a
    host, 100 Gb/s between hosts.
    """
    a100 = find_cluster("A100-40GB").device
    assert a100 is not None
    assert a100.reached is not None
    peak = Peak(0.49e12, 30.3e12, 60e12, 121e12, 121e12, 242e12, 242e12)
    shares = (
        own / of if of else 1.0
        for own, of in zip(dataclasses.astuple(a100.reached.products), dataclasses.astuple(a100.peak), strict=True)
    )
    products = Peak(*(rate * share for rate, share in zip(dataclasses.astuple(peak), shares, strict=True)))
    reached = dataclasses.replace(
        a100.reached, products=products, bandwidth=300e9 * a100.reached.bandwidth / a100.bandwidth
    )
    sizes = 58, 128, 100 << 10, 99 << 10, 24_000_000_000, 300e9, 48 << 20, 2.04
    device = DeviceKind("L4-24GB", "NVIDIA L4", (8, 9), *sizes, peak, threads_per_core=1536, reached=reached)
    return Cluster("l4", max(1, count // 8), min(8, count), Link(10e-6, 12e9), Link(30e-6, 11e9), device=device)


def gpt(sizes: tuple[tuple[str, int], ...], sequence: int, batch: int, flash: bool) -> Model:
    changes = (*sizes, ("sequence", sequence), WORDS, *((("flash", True),) if flash else ()))
    return Model("gpt", "6.7b", batch, changes)


def equal(stages: int, layers: int, again: Sequence[int]) -> list[tuple[int, int, int]]:
    assert len(again) == stages
    return [(layers, own, 1) for own in again]


TUNED = (
    Tuned(
        gpt(SEVEN, 4096, 128, flash=False), ("A100-40GB", 8), 64, 2, 2, [(15, 7, 1), (17, 2, 1)],
    ),
    Tuned(gpt(SEVEN, 4096, 128, flash=True), ("A100-40GB", 8), 32, 4, 1, [(16, 0, 3), (16, 0, 1)]),
    Tuned(
        gpt(TWENTY_TWO, 4096, 512, flash=False), ("A100-40GB", 32), 128, 4, 1,
        [*equal(6, 6, [6] * 6), (6, 4, 3), (6, 3, 2)],
    ),
    Tuned(
        gpt(TWENTY_TWO, 4096, 512, flash=True), ("A100-40GB", 32), 128, 4, 2,
        [(11, 5, 1), (12, 4, 1), (12, 0, 1), (13, 0, 1)],
    ),
    Tuned(
        gpt(SEVEN, 2048, 128, flash=False), ("L4-24GB", 8), 64, 2, 1,
        [(7, 5, 1), (8, 1, 1), (9, 0, 1), (8, 0, 1)], offloads=True,
    ),
    Tuned(
        gpt(SEVEN, 2048, 128, flash=True), ("L4-24GB", 8), 64, 2, 1,
        [(7, 3, 1), (8, 2, 1), (9, 0, 1), (8, 0, 1)], offloads=True,
    ),
    Tuned(
        gpt(TWENTY_TWO, 2048, 512, flash=False), ("L4-24GB", 32), 256, 2, 1,
        equal(16, 3, [3] * 10 + [2] * 3 + [1, 0, 0]),
    ),
    Tuned(
        gpt(TWENTY_TWO, 2048, 512, flash=True), ("L4-24GB", 32), 128, 4, 1,
        equal(8, 6, [1] * 5 + [0] * 3), offloads=True,
    ),
    Tuned(
        Model("llama", "7b", 128, (("sequence", 2048), WORDS)), ("L4-24GB", 8), 64, 2, 1,
        [(7, 4, 1), (8, 3, 1), (9, 0, 1), (8, 0, 1)], offloads=True,
    ),
    Tuned(
        Model("llama", "7b", 512, (("hidden", 6144), ("layers", 48), ("heads", 64), ("groups", 64), ("units", 16384),
                                   ("sequence", 2048), WORDS)),
        ("L4-24GB", 32), 128, 4, 1, equal(8, 6, [1] * 5 + [0] * 3), offloads=True,
    ),
)  # fmt: skip
