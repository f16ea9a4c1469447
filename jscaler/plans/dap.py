"""Dynamic axial parallelism."""
from jscaler.plans.factors import split, device_grid
from jscaler.plans.find_sequence import axes_of
from jscaler.plans.fewest_switches import fewest_switches
from jscaler.plans.data_parallel import batch_factors

def dap(dap=None, dp=1, axes=None, batch="batch"):
    def policy(graph, devices):
        grid = device_grid(devices, "dap", dp=dp, dap=dap)
        rows, parts = grid.shape
        dims = axes_of(graph, axes, "pass dap(axes=...)")
        table = fewest_switches(graph, dims, parts) if parts > 1 else {}
        split(graph, grid, batch_factors(graph, batch, rows) if rows > 1 else {}, table)
    policy.__name__ = "dap"
    return policy
