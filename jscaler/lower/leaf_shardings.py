"""The shardings of a step's inputs and outputs."""

import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jscaler.lower.emit import physical_mesh, sharding
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout


def shardings(step: StepPlan, devices: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings of the step's inputs and outputs on ``devices``, each on the mesh of its group."""
    meshes = {group: physical_mesh(group, devices) for group in step.completed.groups}

    @functools.cache
    def one(layout: Layout) -> NamedSharding | SingleDeviceSharding:
        mesh = meshes[layout.mesh]
        return sharding(layout, mesh) if mesh.axis_names else SingleDeviceSharding(only_device(mesh))

    return tuple(one(step.completed.inputs[t]) for t in step.graph.inputs), tuple(map(one, step.completed.outputs))


def only_device(mesh: Mesh | AbstractMesh) -> Any:
    """The device of a mesh without axes."""
    assert isinstance(mesh, Mesh), "a mesh of absent devices has an axis"
    return mesh.devices.flat[0]
