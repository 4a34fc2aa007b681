"""Joining a Ray cluster, or starting a small one on this machine. Knows nothing of what will run on it.

Ray is imported when it is used. Token authentication (`RAY_AUTH_MODE=token`, `RAY_AUTH_TOKEN`) is Ray's own
and needs nothing here.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.config import MEBIBYTE
from paddock.distribution import install_command
from paddock.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

NAMESPACE = "paddock"
ON_THIS_MACHINE = "local"
REACH_WITHIN = 5.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""What a cluster that we start sets aside for Ray's objects: little goes through them here."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as Ray knows it."""

    id: str
    address: str
    alive: bool
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one host, rollout or instance takes of its node."""

    cpus: float = 1.0
    memory: int | None = None
    """Bytes that Ray sets aside. None: it does not count memory."""
    custom: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, cpus: float, mebibytes: int | None, custom: str | None) -> Resources:
        """As given on a command line: memory in MiB, custom resources as JSON. Raises ConfigError."""
        return cls(cpus, None if mebibytes is None else mebibytes * MEBIBYTE, parse_resources(custom))

    def options(self) -> dict[str, Any]:
        """In the words of `.options()` of a Ray task or actor."""
        known: dict[str, Any] = {"num_cpus": self.cpus}
        if self.memory is not None:
            known["memory"] = self.memory
        return {**known, "resources": self.custom} if self.custom else known

    def bundle(self) -> dict[str, float]:
        """In the words of a placement group, or of a request to the autoscaler."""
        memory = {} if self.memory is None else {"memory": float(self.memory)}
        return {"CPU": self.cpus, **memory, **self.custom}


def ray_module() -> ModuleType:
    """Ray itself. Raises ClusterError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ClusterError("Ray is not installed", hint=install_command("ray")) from error
    return ray


def connect(address: str | None = None, *, folder: Path | None = None, **options: Any) -> str:
    """Join the cluster at `address`, or at RAY_ADDRESS; start one on this machine if there is neither.

    `folder` is copied to every node and can be imported from there; Paddock itself is expected on all of them.
    `options` go to `ray.init`. Returns the address. Raises ClusterError. Joining twice does no harm.
    """
    ray = ray_module()
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    wanted = address or os.environ.get("RAY_ADDRESS") or ON_THIS_MACHINE
    if wanted == ON_THIS_MACHINE:
        # Ray's workers are background jobs (a niceness of 15) unless it is told otherwise; ours serve.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, **options}
    if folder is not None:
        options = {"runtime_env": {"working_dir": str(folder)}, **options}
    try:
        require_listener(wanted)
        ray.init(address=wanted, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **options)
    except Exception as error:
        # Ray raises a bare Exception for a node that did not come up in time.
        hint = "is its head running (`ray start --head`)? Give --ray-address HOST:6379, or leave it out"
        raise ClusterError(f"no Ray cluster at {wanted}: {str(error).strip().splitlines()[0]}", hint=hint) from error
    return str(ray.get_runtime_context().gcs_address)


def require_listener(address: str) -> None:
    """Raise OSError unless somebody listens at HOST:PORT. Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACH_WITHIN).close()


def starts_one(address: str | None = None) -> bool:
    """Whether `connect` would start a cluster on this machine, rather than join one."""
    wanted = address or os.environ.get("RAY_ADDRESS") or ON_THIS_MACHINE
    return not ray_module().is_initialized() and wanted == ON_THIS_MACHINE


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends. What a driver placed ends with it."""
    ray = ray_module()
    if ray.is_initialized():
        ray.shutdown()


@contextmanager
def connected(address: str | None = None, **options: Any) -> Iterator[str]:
    """`connect`, and leave again. A caller who was connected before stays so."""
    joined_here = not ray_module().is_initialized()
    found = connect(address, **options)
    try:
        yield found
    finally:
        if joined_here:
            disconnect()


def nodes() -> list[Node]:
    """The nodes that Ray knows. One that died is believed alive for some seconds."""
    return [
        Node(known["NodeID"], known["NodeManagerAddress"], bool(known["Alive"]), dict(known["Resources"]))
        for known in ray_module().nodes()
    ]


def parse_resources(text: str | None) -> dict[str, float]:
    """Custom resources as given on the command line, `{"sandbox_bwrap": 1}`. Raises ConfigError."""
    try:
        found = json.loads(text) if text else {}
        return {str(name): float(amount) for name, amount in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{text!r} names no resources", hint='give JSON like {"sandbox_bwrap": 1}') from error
