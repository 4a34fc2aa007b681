"""`paddock fleet up --engine ray`: the plane's instances on the nodes of a Ray cluster."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paddock.cli import note

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from paddock.errors import ClusterError
    from paddock.fleet.control import PlaneSettings
    from paddock.scale.cluster import Resources


def place_on_ray(
    settings: PlaneSettings, each: Resources, address: str | None, folder: Path | None, until_the_end: ExitStack
) -> tuple[PlaneSettings, dict[str, Any]]:
    """Join the cluster for as long as the plane is up; the plane's settings there, and what else it is given."""
    from paddock.scale import cluster
    from paddock.scale.instances import Placing, RayInstances

    alone = cluster.starts_one(address)
    until_the_end.enter_context(cluster.connected(address, folder=folder))
    nodes = [node for node in cluster.nodes() if node.alive]
    cores = int(sum(node.resources.get("CPU", 0) for node in nodes))
    settings = replace(settings, parallel_starts=max(2 * cores, 1))
    gone: list[ClusterError] = []

    def give_up(error: ClusterError) -> None:
        """End the plane in order, and the command with the reason."""
        gone.append(error)
        signal.raise_signal(signal.SIGTERM)

    def tell() -> None:
        if gone:
            raise gone[0]

    until_the_end.callback(tell)
    instances = RayInstances(settings, Placing(each, alone), give_up)
    note(
        f"instances go to {len(nodes)} node{'s' if len(nodes) > 1 else ''} with {cores} CPUs, {each.cpus:g} for each"
    )
    return settings, {"launcher": instances, "verify": instances.verify}
