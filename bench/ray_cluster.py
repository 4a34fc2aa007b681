"""A real Ray cluster on this machine, for tests and benchmarks: nodes are processes, addresses are loopback.

The nodes belong to a process of their own, which reads commands as lines of JSON and ends all nodes when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paddock.processes import find_descendants, process_start_time

if TYPE_CHECKING:
    from paddock.store.record import RolloutRecord

OBJECT_STORE_BYTES = 80 * 1024 * 1024
EXIT_SECONDS = 20.0
REAP_SECONDS = 0.5
PROGRAM = f"import sys; sys.path.append({str(Path(__file__).parent.parent)!r}); from {__name__} import main; main()"


@dataclass(frozen=True, slots=True)
class LocalNode:
    node_id: str
    address: str


class LocalCluster:
    """`nodes` nodes with addresses 127.0.0.2, 127.0.0.3, …; the first is the head. Use it in `with`.

    With `state` the head keeps its tables in that folder, as it otherwise would in Redis.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        cpus: float = 2,
        resources: dict[str, float] | None = None,
        state: Path | None = None,
    ) -> None:
        self.address = ""
        self.nodes: list[LocalNode] = []
        """Also those that ended."""
        self._count = nodes
        self._usual = {"num_cpus": cpus, "resources": resources or {}}
        self._environ = {} if state is None else {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(state)}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", PROGRAM]
        environ = {"RAY_worker_niceness": "0", **os.environ, **self._environ}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        try:
            for _ in range(self._count):
                self.add_node()
            self._call("wait", self._count)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(EXIT_SECONDS)
            finally:
                process.kill()

    def add_node(self, **options: Any) -> None:
        """One more node."""
        self.address, node_id, address = self._call("add", {**self._usual, **options})
        self.nodes.append(LocalNode(node_id, address))

    def kill_node(self, number: int) -> list[int]:
        """The node's power is cut: kill -9 of all its processes at once. Returns their ids."""
        killed: list[int] = self._call("kill", number)
        return killed

    def kill_gcs(self) -> int:
        """The head's own process is killed: its node lives on for as long as Ray waits. Returns its id."""
        killed: int = self._call("kill_gcs", None)
        return killed

    def start_gcs(self) -> None:
        """Start it again, at the same address. Without `state` it has lost everything."""
        self._call("start_gcs", None)

    def restart_head(self) -> None:
        """A new head at the address of the first node, whose processes are killed before."""
        self.nodes[0] = LocalNode(*self._call("restart_head", [self.address, self._usual]))

    def _call(self, verb: str, argument: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([verb, argument]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the cluster's process ended; see stderr")
        return json.loads(line)


class NodeManager:
    """The other end of the pipe: holds Ray's own handles of the nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(shutdown_at_exit=True)
        self.nodes: list[Any] = []
        self._workers: dict[int, int | None] = {}
        """Every worker so far, with its start time: those of a node that has ended cannot be found any more."""
        threading.Thread(target=self._reap, daemon=True).start()

    def _reap(self) -> None:
        """Reap zombies: a worker checks whether the process of its node exists, and a zombie does."""
        while True:
            time.sleep(REAP_SECONDS)
            for node in list(self.nodes):
                self._workers.update({pid: process_start_time(pid) for pid in workers_of(node)})
                for group in list(node.all_processes.values()):
                    for started in list(group):
                        started.process.poll()

    def add(self, options: dict[str, Any]) -> tuple[str, str, str]:
        number = len(self.nodes)
        head = {"include_dashboard": False} if number == 0 else {}
        address = f"127.0.0.{number + 2}"
        settings = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": address, **head, **options}
        node = self.cluster.add_node(wait=number == 0, **settings)
        self.nodes.append(node)
        return str(self.cluster.address), str(node.node_id), address

    def wait(self, nodes: int) -> int:
        self.cluster.wait_for_nodes()
        return nodes

    def kill(self, number: int) -> list[int]:
        node = self.nodes[number]
        own = [started.process.pid for group in node.all_processes.values() for started in group]
        pids = [*workers_of(node), *own]
        kill_all(pids)
        with suppress(Exception):
            self.cluster.remove_node(node, allow_graceful=False)
        return pids

    def kill_gcs(self, _: None) -> int:
        head = self.nodes[0]
        pid: int = head.all_processes["gcs_server"][0].process.pid
        head.kill_gcs_server(check_alive=False)
        return pid

    def start_gcs(self, _: None) -> None:
        self.nodes[0].start_gcs_server()

    def restart_head(self, arguments: tuple[str, dict[str, Any]]) -> tuple[str, str]:
        head, options = arguments
        address, port = head.rsplit(":", 1)
        self.kill(0)
        settings = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": address, "include_dashboard": False}
        self.nodes[0] = self.cluster.add_node(gcs_server_port=int(port), **settings, **options)
        return str(self.nodes[0].node_id), address

    def close(self) -> None:
        left = [pid for node in self.nodes for pid in workers_of(node)]
        left += [pid for pid, start in list(self._workers.items()) if start and process_start_time(pid) == start]
        self.cluster.shutdown()
        kill_all(left)


def workers_of(node: Any) -> list[int]:
    """The processes below a node's raylet: its workers, with actors and tasks, and their children."""
    return [pid for raylet in node.all_processes.get("raylet", []) for pid in find_descendants(raylet.process.pid)]


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += [int(child) for child in (task / "children").read_text().split()]
    return children


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve one user, until its end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    manager = NodeManager()
    try:
        for line in sys.stdin:
            verb, argument = json.loads(line)
            answers.write(json.dumps(getattr(manager, verb)(argument)) + "\n")
            answers.flush()
    finally:
        manager.close()


def rollouts_per_minute(records: list[RolloutRecord]) -> float:
    """How many ended per minute, from the first start to the last end."""
    ended = [record for record in records if record.finished_at is not None]
    if not ended:
        return 0.0
    began = min(record.started_at for record in ended)
    seconds = max(record.finished_at or 0.0 for record in ended) - began
    return 60.0 * len(ended) / max(seconds, 1e-9)
