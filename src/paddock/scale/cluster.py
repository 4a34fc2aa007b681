"""Joining a Ray cluster or starting one on this machine, and watching its head. Does not know what runs there.

Ray is imported when it is used. Token authentication (`RAY_AUTH_MODE=token`, `RAY_AUTH_TOKEN`) is Ray's own and needs
nothing here.

While the head of a cluster is away, Ray mostly waits silently. After a minute it ends the process, and leaves what
that process has placed. `ClusterHead` probes the head each second, so that there is time for an orderly end. By
default a head keeps everything in memory: one that was restarted does not know its cluster any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paddock.config import RAY_ADDRESS, RAY_RECONNECT_SECONDS
from paddock.distribution import install_command
from paddock.errors import ClusterError, ConfigError
from paddock.limits import MEBIBYTE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path
    from types import ModuleType

ResultT = TypeVar("ResultT")
HeadState = Literal["there", "away", "forgot", "cut off"]

NAMESPACE = "paddock"
LOCAL_CLUSTER = "local"
REACH_SECONDS = 5.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""For Ray's object store in a cluster that we start. Paddock sends little through it."""
PROBE_INTERVAL_SECONDS = 1.0
PROBE_SECONDS = 2.0
SHUTDOWN_SECONDS = 20.0
"""The part of Ray's reconnect timeout that is kept for an orderly end. Ray itself needs five seconds of it."""
GRPC_UNAUTHENTICATED = 16
KEY, SPACE = b"head", b"paddock"
logger = logging.getLogger("paddock.scale")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as Ray lists it."""

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
        """From a command line: memory in MiB, custom resources as JSON. Raises ConfigError."""
        return cls(cpus, None if mebibytes is None else mebibytes * MEBIBYTE, parse_resources(custom))

    def options(self) -> dict[str, Any]:
        """As arguments of `.options()` of a Ray task or actor."""
        options: dict[str, Any] = {"num_cpus": self.cpus}
        if self.memory is not None:
            options["memory"] = self.memory
        return {**options, "resources": self.custom} if self.custom else options

    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group, or of a request to the autoscaler."""
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
    target = address or RAY_ADDRESS.read() or LOCAL_CLUSTER
    if target == LOCAL_CLUSTER:
        # Ray starts its workers with a niceness of 15 by default. Ours are servers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, **options}
    if folder is not None:
        options = {"runtime_env": {"working_dir": str(folder)}, **options}
    try:
        require_listener(target)
        ray.init(address=target, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **options)
    except Exception as error:
        # Ray raises a bare Exception for a node that did not come up in time.
        hint = "is its head running (`ray start --head`)? Give --ray-address HOST:6379, or leave it out"
        raise ClusterError(f"no Ray cluster at {target}: {str(error).strip().splitlines()[0]}", hint=hint) from error
    return str(ray.get_runtime_context().gcs_address)


def require_listener(address: str) -> None:
    """Raise OSError unless a process listens at HOST:PORT. Ray itself would retry for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()


def starts_local_cluster(address: str | None = None) -> bool:
    """Whether `connect` would start a cluster on this machine, rather than join one."""
    target = address or RAY_ADDRESS.read() or LOCAL_CLUSTER
    return not ray_module().is_initialized() and target == LOCAL_CLUSTER


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends. What a driver placed ends with it."""
    ray = ray_module()
    if ray.is_initialized():
        ray.shutdown()


@contextmanager
def connected(address: str | None = None, **options: Any) -> Iterator[str]:
    """`connect`, and leave again, unless this process had joined before."""
    joined_here = not ray_module().is_initialized()
    joined_address = connect(address, **options)
    try:
        yield joined_address
    finally:
        if joined_here:
            disconnect()


def nodes() -> list[Node]:
    """The nodes that Ray lists. One that died counts as alive for some seconds."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], bool(node["Alive"]), dict(node["Resources"]))
        for node in ray_module().nodes()
    ]


def parse_resources(text: str | None) -> dict[str, float]:
    """Custom resources from the command line, `{"sandbox_bwrap": 1}`. Raises ConfigError."""
    try:
        document = json.loads(text) if text else {}
        return {str(name): float(amount) for name, amount in document.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{text!r} names no resources", hint='give JSON like {"sandbox_bwrap": 1}') from error


# -- the head ---------------------------------------------------------------------------------------------


class ClusterHead:
    """Check `is_reachable` before anything is placed. Run `watch` in a task of its own."""

    def __init__(
        self,
        address: str,
        probe: Callable[[], HeadState] | None = None,
        *,
        max_absence: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.unreachable_since: float | None = None
        self.failure: ClusterError | None = None
        self._probe = probe or probe_head
        self._max_absence = max_absence_seconds() if max_absence is None else max_absence
        self._clock = clock
        self._changed = asyncio.Event()

    @classmethod
    def current(cls) -> ClusterHead:
        """The head of the cluster that this process has joined."""
        return cls(str(ray_module().get_runtime_context().gcs_address))

    @property
    def is_reachable(self) -> bool:
        return self.unreachable_since is None and self.failure is None

    def describe(self) -> dict[str, Any]:
        since = self.unreachable_since
        return {"address": self.address, "away_seconds": None if since is None else round(self._clock() - since, 1)}

    async def watch(self) -> ClusterError:
        """Probe it until it has failed for good; returns why. Losses and returns are logged."""
        while self.failure is None:
            self.record(await self._probe_with_timeout())
            if self.failure is None:
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        logger.error("%s", self.failure)
        return self.failure

    @asynccontextmanager
    async def cancel_on_failure(self) -> AsyncIterator[None]:
        """Cancels the block when the head has failed for good, and raises ClusterError then."""
        block = asyncio.current_task()
        assert block is not None
        watching = asyncio.ensure_future(self.watch())
        watching.add_done_callback(lambda _: self.failure is not None and block.cancel())
        try:
            yield
        except asyncio.CancelledError:
            if self.failure is None or block.uncancel() > 0:
                raise
            raise self.failure from None
        finally:
            watching.cancel()

    async def wait_for_change(self) -> None:
        """Wait until it goes, comes back or has failed for good."""
        await self._changed.wait()

    def record(self, state: HeadState) -> None:
        """Update the state with the result of a probe."""
        before = (self.unreachable_since is None, self.failure is None)
        if state in FINAL_STATES:
            self.failure = FINAL_STATES[state](self.address)
        elif state == "there":
            if self.unreachable_since is not None:
                logger.warning("the Ray head at %s is back", self.address)
            self.unreachable_since = None
        elif self.unreachable_since is None:
            self.unreachable_since = self._clock()
            logger.error(
                "the Ray head at %s does not answer: what runs goes on, nothing new is placed; waiting %g s for it",
                self.address,
                self._max_absence,
            )
        elif self._clock() - self.unreachable_since >= self._max_absence:
            self.failure = unreachable_error(self.address, self._max_absence)
        if before != (self.unreachable_since is None, self.failure is None):
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _probe_with_timeout(self) -> HeadState:
        try:
            # Ray ends a probe by itself. The extra time is for a thread that gets no core.
            return await call_ray(self._probe, 3 * PROBE_SECONDS)
        except TimeoutError:
            return "away"


def probe_head() -> HeadState:
    """Send it a small request through our own node. Blocks for two seconds at most."""
    from ray._private import worker

    driver: Any = worker.global_worker
    try:
        if not is_listening(str(driver.node.raylet_socket_name)):
            return "cut off"
        driver.gcs_client.internal_kv_exists(KEY, SPACE, timeout=PROBE_SECONDS)
    except AttributeError:
        # This process has left the cluster, or this version of Ray has no such attributes.
        return "there"
    except Exception as error:
        # Older versions of Ray have no class for it.
        refused = type(error).__name__ == "AuthenticationError"
        return "forgot" if refused or getattr(error, "rpc_code", None) == GRPC_UNAUTHENTICATED else "away"
    return "there"


def is_listening(path: str) -> bool:
    """Whether a process listens on a Unix socket. A node whose process died leaves the socket file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


async def call_ray(call: Callable[[], ResultT], seconds: float) -> ResultT:
    """Make a blocking call into Ray from a thread. A call that does not return is abandoned. Raises TimeoutError.

    The thread is a daemon of its own: asyncio would wait for a thread of its pool when the loop closes.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ResultT] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            settle_it(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (answer.set_result, call())
        except Exception as error:
            outcome = (answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            logger.debug("an answer of Ray came after the end: %s", outcome[1])

    threading.Thread(target=run, name="paddock-ray-call", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await answer


def max_absence_seconds() -> float:
    """How long a head may be away before we give up."""
    waits = RAY_RECONNECT_SECONDS.read()
    return max(waits - SHUTDOWN_SECONDS, waits / 3)


def unreachable_error(address: str, seconds: float) -> ClusterError:
    return ClusterError(
        f"the Ray head at {address} has not answered for {seconds:g} s",
        hint="start the head and its nodes again (`ray stop`, `ray start`), then this command",
    )


def restarted_error(address: str) -> ClusterError:
    return ClusterError(
        f"the Ray head at {address} was started anew and knows nothing of this cluster any more",
        hint="start its nodes again (`ray stop`, `ray start --address`), then this command",
    )


def node_lost_error(address: str) -> ClusterError:
    return ClusterError(
        f"the Ray node that this process used is gone, and with it the way to the head at {address}",
        hint="start the node again (`ray start`; the head first, if it is gone too), then this command",
    )


FINAL_STATES: dict[HeadState, Callable[[str], ClusterError]] = {"forgot": restarted_error, "cut off": node_lost_error}
"""States in which waiting does not help."""
