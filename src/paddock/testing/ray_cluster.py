"""A real Ray cluster on this machine, for tests and benchmarks: nodes are processes, addresses are loopback."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

OBJECT_STORE_BYTES = 80 * 1024 * 1024


class LocalCluster:
    """`nodes` nodes with addresses 127.0.0.2, 127.0.0.3, …; the first is the head. Use it in `with`."""

    def __init__(self, nodes: int = 3, *, cpus: float = 2, resources: dict[str, float] | None = None) -> None:
        self._count = nodes
        self._cpus = cpus
        self._resources = resources or {}
        self._cluster: Any = None
        self.nodes: list[Any] = []

    def __enter__(self) -> Self:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=True)
        try:
            for _ in range(self._count):
                self.add_node()
        except BaseException:
            self._cluster.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            kill_all(workers_of(node))
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, **options: Any) -> Any:
        """One more node. Returns Ray's handle of it."""
        node = self._cluster.add_node(
            num_cpus=self._cpus, resources=dict(self._resources), object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=f"127.0.0.{len(self.nodes) + 2}", include_dashboard=False, **options,
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def kill_node(self, number: int) -> list[int]:
        """The node's power is cut: kill -9 of all its processes at once. Returns their ids."""
        node = self.nodes[number]
        pids = [
            *workers_of(node),
            *(process.process.pid for group in node.all_processes.values() for process in group),
        ]
        kill_all(pids)
        with suppress(Exception):
            self._cluster.remove_node(node, allow_graceful=False)
        return pids


def workers_of(node: Any) -> list[int]:
    """The processes below a node's raylet: its workers, with actors and tasks, and their children."""
    raylets = [process.process.pid for process in node.all_processes.get("raylet", [])]
    found: list[int] = []
    waiting = list(raylets)
    while waiting:
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
