"""What XLA reserves for a configuration of `bench.paper`: each distinct block compiled for the paper's cluster, no GPU."""

import sys
import warnings

import jscaler
from bench.paper_models import Model, batch_of
from jscaler.clusters import Cluster
from jscaler.report.targets import described_devices


def compiled_peak(model: Model, text: str, cluster: Cluster) -> int:
    """Bytes of the fullest device, the peak over the table of the compiled blocks; needs the extra ``aot``."""
    from models.recipes import RECIPES

    print(f"{model.shown} on {cluster.name}, compiled: {text}", file=sys.stderr, flush=True)
    devices = described_devices(cluster)
    step = jscaler.parallelize(text, devices=devices, donate_argnums=0, cluster=cluster)(RECIPES[model.name].step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = step.lower(model.state, batch_of(model.name, model.config, model.batch))
        return int(lowered.compile(target=cluster).memory.peak)
