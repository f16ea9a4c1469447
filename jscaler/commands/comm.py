"""``jscaler bench-comm``: what communication costs on the devices at hand, as a cluster file for the search."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jscaler.clusters import Cluster, cluster_toml
from jscaler.commands.options import use_platform
from jscaler.commands.processes import Coordinator, Distributed, LocalDevices, Process, Processes, join
from jscaler.commands.screen import screen, show
from jscaler.errors import DeviceError
from jscaler.report.written import check_file, writing
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from jscaler.clusters.calibration import Calibration, Sample


def bench_comm(
    devices: Annotated[int | None, typer.Option(help="number of devices, in a job of each process; all by default")] = None,
    platform: Annotated[str | None, typer.Option(help="'cpu' makes as many virtual CPU devices as are asked for")] = None,
    out: Annotated[Path | None, typer.Option(help="write the fitted cluster to this .toml file")] = None,
    largest: Annotated[int, typer.Option(help="bytes of the largest message", min=1024)] = 16 << 20,
    rounds: Annotated[int, typer.Option(help="timed runs of each; the least counts", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="three sizes up to 1 MiB, two runs of each")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
    distributed: Distributed = False,
    local_devices: LocalDevices = None,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
) -> None:
    """Measure collectives, and fit the latency and bandwidth of each class of links.

    Example: jscaler bench-comm --platform cpu --devices 8 --quick --out cluster.toml
    """
    from jscaler.clusters import calibration, measure
    from jscaler.runtime.devices import resolve_devices

    refuse_suffix(out)
    check_file("cluster file", out)
    joins = functools.partial(join, coordinator, processes, process, distributed, local_devices)
    use_platform(platform, devices, joins)
    hosts = measure.by_host(resolve_devices(None if jax.process_count() > 1 else devices), devices)
    sizes = measure.sizes_up_to(1 << 20, factor=32) if quick else measure.sizes_up_to(largest)
    console = Console(stderr=True, quiet=jax.process_index() != 0)
    trials = track(measure.trials(hosts, sizes), "measuring collectives", console=console, transient=True)
    samples = [measure.measure(trial, 2 if quick else rounds) for trial in trials]
    if jax.process_index() != 0:
        return
    fits = calibration.fit_all(samples)
    memory = measure.device_memory(jax.local_devices()[0])
    cluster = calibration.fitted_cluster(fits, _name(hosts), len(hosts), hosts.shape[1], memory)
    if out is not None:
        with writing("cluster file", out):
            out.write_text(cluster_toml(cluster, _header(hosts, fits)), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(_record(cluster, samples, fits)))
    else:
        _show(screen(), samples, fits, out)


def samples_table(samples: Sequence["Sample"], fits: Sequence["Calibration"]) -> Table:
    """Each measurement beside what the fit of its class of links says."""
    from jscaler.clusters.calibration import fitted_seconds, relative_error

    links = {fit.link_class: fit.link for fit in fits if fit.kind is None}
    header = ("collective", "links", "members", "bytes sent", "seconds", "fitted", "error")
    rows = [
        (s.kind, s.link, s.members, readable_bytes(s.nbytes), readable_seconds(s.seconds),
         readable_seconds(fitted_seconds(links[s.link], s)), f"{relative_error(links[s.link], s):+.0%}")
        for s in samples
    ]  # fmt: skip
    return table("collectives, all groups at once", header, rows)


def fits_table(fits: Sequence["Calibration"]) -> Table:
    """The figures of each class of links: of all collectives together, and of each by itself."""
    rows = [
        (f.link_class, f.kind or "all", readable_seconds(f.link.latency), _rate(f.link.bandwidth), f"{f.error:.0%}")
        for f in fits
    ]
    title = "fitted links"
    if copy := _copied(fits):
        title += f" ({copy})"
    return table(title, ("links", "collective", "latency per step", "bandwidth", "mean error"), rows)


def _show(console: Console, samples: Sequence["Sample"], fits: Sequence["Calibration"], out: Path | None) -> None:
    console.print(samples_table(samples, fits))
    console.print(fits_table(fits))
    if out is not None:
        show(console, f"written: {out}")


def _record(cluster: Cluster, samples: Sequence["Sample"], fits: Sequence["Calibration"]) -> dict[str, Any]:
    links = {key: getattr(cluster, key) for key in ("inside", "between")}
    return {
        "cluster": {
            "name": cluster.name,
            "hosts": cluster.hosts,
            "devices_per_host": cluster.devices_per_host,
            "memory": cluster.memory,
            **{key: {"latency": link.latency, "bandwidth": link.bandwidth} for key, link in links.items()},
        },
        "note": _copied(fits),
        "samples": [s._asdict() for s in samples],
        "fits": [
            {"links": f.link_class, "collective": f.kind, "latency": f.link.latency, "bandwidth": f.link.bandwidth,
             "error": f.error}
            for f in fits
        ],
    }  # fmt: skip


def _copied(fits: Sequence["Calibration"]) -> str:
    """What to say when there was only one class of links to measure."""
    found = {fit.link_class for fit in fits}
    if "between" not in found:
        return "one host: 'between' is a copy of 'inside'"
    return "one device per host: 'inside' is a copy of 'between'" if "inside" not in found else ""


def _header(hosts: Any, fits: Sequence["Calibration"]) -> list[str]:
    device = hosts.flat[0]
    errors = ", ".join(f"{f.link_class} {f.error:.0%}" for f in fits if f.kind is None)
    measured = f"measured by jscaler bench-comm on {hosts.size} × {device.device_kind} (jax {jax.__version__})"
    return [line for line in (measured, f"mean relative error of the fit: {errors}", _copied(fits)) if line]


def _name(hosts: Any) -> str:
    kind = "-".join(hosts.flat[0].device_kind.lower().split())
    return f"{kind}-{hosts.shape[0]}x{hosts.shape[1]}"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth < 1e14 else "no limit seen"


def refuse_suffix(out: Path | None) -> None:
    """Raises DeviceError where a cluster file has another suffix than it is read by."""
    if out is not None and out.suffix != ".toml":
        raise DeviceError(f"a cluster file is named *.toml, not '{out}'; give --out {out.with_suffix('.toml')}")
