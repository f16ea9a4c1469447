"""``jscaler calibrate``: what the devices at hand, and the links between them, reach, as a cluster file for estimates."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jscaler.clusters import Cluster, cluster_toml
from jscaler.clusters.device import DEVICE_KINDS, DeviceKind, find_kind, kind_of
from jscaler.clusters.link import usual_links
from jscaler.commands.comm import fits_table, refuse_suffix
from jscaler.commands.options import use_platform
from jscaler.commands.screen import screen, show
from jscaler.errors import DeviceError
from jscaler.report.written import check_file, writing
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from jscaler.clusters.calibration import Calibration
    from jscaler.clusters.measure_device import DeviceSample


def calibrate_(
    devices: Annotated[int | None, typer.Option(help="number of devices; all by default")] = None,
    platform: Annotated[str | None, typer.Option(help="'cpu' makes as many virtual CPU devices as are asked for")] = None,
    like: Annotated[str | None, typer.Option(help="built-in kind that a device is like whose name is not known")] = None,
    out: Annotated[Path | None, typer.Option(help="write the cluster to this .toml file")] = None,
    rounds: Annotated[int, typer.Option(help="timed runs of each; the least counts", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, two runs of each")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Measure products, memory and launches of one device, products beside copies, and collectives where there are several.

    The file that it writes is a cluster: give it as --target, or to jscaler.cost.

    Example: jscaler calibrate --out lab.toml
    """
    from jscaler.clusters import calibration, measure
    from jscaler.clusters.measure_device import device_trials, fit_reached, measure_device
    from jscaler.runtime.devices import resolve_devices

    refuse_suffix(out)
    check_file("cluster file", out)
    use_platform(platform, devices)
    chosen = resolve_devices(devices)
    kind = _kind(chosen[0].device_kind, like)
    assert kind.reached is not None
    console = Console(stderr=True)
    rounds = 2 if quick else rounds
    alone = list(device_trials(kind, quick))
    samples = [
        measure_device(trial, chosen[0], rounds, chosen[1] if len(chosen) > 1 else None)
        for trial in track(alone, "measuring a device", console=console, transient=True)
    ]
    fits: list[Calibration] = []
    if len(chosen) > 1:
        sizes = measure.sizes_up_to(1 << 20, factor=32) if quick else measure.sizes_up_to(16 << 20)
        trials = track(
            measure.trials(measure.by_host(chosen), sizes), "measuring collectives", console=console, transient=True
        )
        fits = calibration.fit_all([measure.measure(trial, rounds) for trial in trials])
    memory = measure.device_memory(chosen[0])
    name = kind.name if kind_of(chosen[0].device_kind) is not None else chosen[0].device_kind
    kind = replace(kind, name=name, reached=fit_reached(samples, kind, kind.reached), memory=memory or kind.memory)
    cluster = _cluster(kind, len(chosen), fits, str(chosen[0].device_kind))
    if out is not None:
        said = f"measured by jscaler calibrate on {len(chosen)} × {chosen[0].device_kind} (jax {jax.__version__})"
        with writing("cluster file", out):
            out.write_text(cluster_toml(cluster, [said]), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(_record(cluster, samples)))
        return
    screen().print(samples_table(samples, kind))
    if fits:
        screen().print(fits_table(fits))
    if out is not None:
        show(screen(), f"written: {out}")


def samples_table(samples: Sequence["DeviceSample"], kind: DeviceKind) -> Table:
    """Each measurement, and which part of the peak it is."""
    rows = []
    for (what, field, size, _), amount, seconds in samples:
        rate = amount / seconds
        if what == "product":
            shown = (
                f"{field}, {size} × {size} × {size}",
                f"{rate / 1e12:.4g} TFLOP/s",
                f"{rate / getattr(kind.peak, field):.0%}",
            )
        elif what == "memory":
            shown = f"{readable_bytes(size)} read and written", f"{rate / 1e9:.4g} GB/s", f"{rate / kind.bandwidth:.0%}"
        elif what == "beside":
            shown = f"{field}, {size} × {size} × {size}, while copies leave", f"{amount:.3g} times as long", ""
        else:
            shown = "a small product behind another", "", ""
        rows.append((what, shown[0], readable_seconds(seconds), *shown[1:]))
    return table(f"one {kind.name}", ("what", "size", "seconds", "rate", "of the peak"), rows)


def _kind(description: str, like: str | None) -> DeviceKind:
    found = find_kind(like, " of --like") if like is not None else kind_of(description)
    if found is None:
        raise DeviceError(
            f"no data sheet is built in of '{description}': say which kind it is like with --like "
            f"({', '.join(DEVICE_KINDS)}), or write the cluster file by hand (docs/clusters.md)"
        )
    return found


def _cluster(kind: DeviceKind, count: int, fits: Sequence["Calibration"], description: str) -> Cluster:
    """One host of the devices; without links that were measured, those that are usual for the kind."""
    links = {fit.link_class: fit.link for fit in fits if fit.kind is None}
    usual = usual_links(kind, count)
    assert usual is not None, f"no usual links for {kind}"
    inside = links.get("inside", usual[0])
    between = usual[1] if "inside" not in links else links.get("between", inside)
    name = f"{'-'.join(description.lower().split())}-{count}"
    return Cluster(name, 1, count, inside, between, device=kind)


def _record(cluster: Cluster, samples: Sequence["DeviceSample"]) -> dict[str, Any]:
    assert cluster.device is not None
    assert cluster.device.reached is not None
    reached = cluster.device.reached
    return {
        "cluster": cluster.name, "device": cluster.device.name, "devices": cluster.num_devices,
        "reached": {
            "products": vars(reached.products), "bandwidth": reached.bandwidth, "launch": reached.launch,
            "interference": reached.interference,
        },
        "links": {key: vars(getattr(cluster, key)) for key in ("inside", "between")},
        "samples": [{**s.trial._asdict(), "amount": s.amount, "seconds": s.seconds} for s in samples],
    }  # fmt: skip
