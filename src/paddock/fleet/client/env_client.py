"""The orchestrator's side of an instance: create it, reset it, query its databases, end it.

An agent's tools are in `paddock.fleet.client.tools`: code that has only the tools cannot reset or end anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, Self

from paddock.fleet.client import leases
from paddock.fleet.client.errors import FleetError, PlaneError, ProtocolError
from paddock.fleet.client.events import HeartbeatFailed, TaskContext, ambient_context
from paddock.fleet.client.http import is_confirmed, retry_request, send
from paddock.fleet.client.models import CallToolAction, ListToolsAction
from paddock.fleet.client.plane_client import InstanceOptions, PlaneClient
from paddock.fleet.client.provisioning import LIMIT_SECONDS, Provisioning
from paddock.fleet.client.settings import plane_address
from paddock.fleet.client.tools import FleetMCPTools
from paddock.loop_thread import LoopThread
from paddock.retry import Backoff, Deadline
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus
from paddock.types import Observation, State, StepResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.fleet.client.instance_handle import InstanceHandle
    from paddock.fleet.client.tools import Collision, Partial

CREATE_SECONDS = 900.0
RETRIES = Backoff(attempts=3)


class FleetEnvClient:
    """Orchestrates one instance over HTTP. Async methods end in `_async`; the others run on a loop thread."""

    def __init__(
        self,
        base_url: str,
        fleet_env_handle: InstanceHandle | None,
        api_key: str,
        mcp_urls: Sequence[str],
        *,
        request_timeout_s: float = 15.0,
        default_headers: Mapping[str, str] | None = None,
        context: TaskContext | None = None,
        bus: Bus = process_bus,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._fleet_env = fleet_env_handle
        self._headers = {"Authorization": f"Bearer {api_key}", **(default_headers or {})}
        self.mcp_urls = tuple(mcp_urls)
        self._timeout = request_timeout_s
        self._context = context or ambient_context()
        self._bus = bus
        self._thread = LoopThread("paddock-fleet")
        self._heartbeats: asyncio.Task[None] | None = None

    # -- creating ---------------------------------------------------------------------------------------

    @classmethod
    def from_fleet(
        cls,
        api_key: str,
        env_key: str,
        data_key: str | None = None,
        data_version: str | None = None,
        image_type: str | None = None,
        region: str | None = None,
        ttl_seconds: int | None = 3600,
        env_variables: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[FleetEnvClient, FleetMCPTools | Any]:
        """The same as `from_fleet_async`, for code that is not async."""
        thread = LoopThread("paddock-fleet")
        try:
            orchestrator, tools = thread.call(
                cls.from_fleet_async, api_key, env_key, data_key, data_version, image_type, region, ttl_seconds,
                env_variables, **options,
            )  # fmt: skip
        except BaseException:
            thread.close()
            raise
        orchestrator._thread = thread
        return orchestrator, tools

    @classmethod
    async def from_fleet_async(
        cls,
        api_key: str,
        env_key: str,
        data_key: str | None = None,
        data_version: str | None = None,
        image_type: str | None = None,
        region: str | None = None,
        ttl_seconds: int | None = 3600,
        env_variables: dict[str, Any] | None = None,
        skip_mcp: bool = False,
        *,
        base_url: str | None = None,
        run_id: str | None = None,
        heartbeat_interval: int | None = None,
        create_timeout_s: float = CREATE_SECONDS,
        limit_wait_s: float = LIMIT_SECONDS,
        on_collision: Collision = "first",
        on_partial: Partial = "report",
        context: TaskContext | None = None,
        bus: Bus = process_bus,
        **client_options: Any,
    ) -> tuple[FleetEnvClient, FleetMCPTools | Any]:
        """Create an instance, and return its two sides: the orchestrator's and the agent's.

        With `skip_mcp` the tools are None. `base_url` is the control plane's. Other options go to the constructor.
        Raises ProvisioningFailed.
        """
        plane = PlaneClient(plane_address(api_key, base_url))
        context = context or _context_for(env_key)
        options = InstanceOptions(
            env_key=env_key,
            data_key=data_key,
            data_version=data_version,
            image_type=image_type,
            region=region,
            ttl_seconds=ttl_seconds,
            env_variables=env_variables,
            heartbeat_interval=heartbeat_interval,
            run_id=run_id or leases.run_id(),
        )
        provisioning = Provisioning(
            plane, options, seconds=create_timeout_s, limit_seconds=limit_wait_s, context=context, bus=bus
        )
        handle = await provisioning.run()
        instance = handle.data
        assert instance.urls is not None
        urls = () if skip_mcp else instance.urls.mcp(image_type)
        try:
            orchestrator = cls(
                instance.urls.manager, handle, plane.address.api_key, urls, context=context, bus=bus, **client_options
            )
            tools = None
            if not skip_mcp:
                tools = FleetMCPTools(
                    api_key=plane.address.api_key,
                    mcp_urls=urls,
                    on_collision=on_collision,
                    on_partial=on_partial,
                    context=context,
                    bus=bus,
                    handle=handle,
                )
        except BaseException:
            await handle.close(bus)
            raise
        orchestrator.keep_alive()
        return orchestrator, tools

    # -- the episode ----------------------------------------------------------------------------------

    async def reset_async(self, seed: int | None = None, *, timeout: float | None = None) -> StepResult[Observation]:
        """Reset the environment. Raises FleetError unless the instance confirms it."""
        payload = await self._request("POST", "/reset", {} if seed is None else {"seed": seed}, timeout, retry=True)
        if not is_confirmed(payload):
            # Without a reset, the work of an earlier episode would be graded.
            raise ProtocolError("the instance answered a reset without confirming it: no success, no observation")
        return _step_result(payload)

    async def step_async(self, action: Any) -> StepResult[Observation]:
        """Send an action to an environment that has its own `step`. Raises TypeError for tool actions."""
        if isinstance(action, ListToolsAction | CallToolAction):
            raise TypeError("tools are the agent's side: use FleetMCPTools.list_tools() and call_tool()")
        return _step_result(await self._request("POST", "/step", {"action": _to_dict(action)}))

    async def state_async(self) -> Any:
        """The state of the environment."""
        payload = await self._request("GET", "/state", retry=True)
        return State(**payload) if isinstance(payload, dict) else payload

    async def describe_db_async(self, db_name: str = "seed") -> dict[str, Any]:
        """The tables of a database of the instance."""
        path = f"/resources/sqlite/{db_name}/describe"
        return _require_object(await self._request("GET", path, retry=True, failure_is_data=True))

    async def query_db_async(self, sql: str, args: list[Any] | None = None, db_name: str = "seed") -> dict[str, Any]:
        """Read from a database of the instance. An SQL error comes back as `success: False`."""
        body = {"query": sql, "args": args, "read_only": True}
        path = f"/resources/sqlite/{db_name}/query"
        return _require_object(await self._request("POST", path, body, retry=True, failure_is_data=True))

    async def close_async(self) -> None:
        """End the instance. Quiet if it has ended already."""
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None and not heartbeats.get_loop().is_closed():
            heartbeats.get_loop().call_soon_threadsafe(heartbeats.cancel)
        try:
            if self._fleet_env is not None:
                await self._fleet_env.close(self._bus)
        finally:
            if not self._thread.is_current:
                self._thread.close()

    # -- the same, for code that is not async ---------------------------------------------------------

    def reset(self, seed: int | None = None) -> StepResult[Observation]:
        """The same as `reset_async`, for code that is not async."""
        return self._thread.call(self.reset_async, seed)

    def step(self, action: Any) -> StepResult[Observation]:
        """The same as `step_async`, for code that is not async."""
        return self._thread.call(self.step_async, action)

    def state(self) -> Any:
        """The same as `state_async`, for code that is not async."""
        return self._thread.call(self.state_async)

    def describe_db(self, db_name: str = "seed") -> dict[str, Any]:
        """The tables of a database of the instance."""
        return self._thread.call(self.describe_db_async, db_name)

    def query_db(self, sql: str, args: list[Any] | None = None, db_name: str = "seed") -> dict[str, Any]:
        """The rows that a query returns, from a database of the instance."""
        return self._thread.call(self.query_db_async, sql, args, db_name)

    def close(self) -> None:
        """End the instance and the loop thread."""
        try:
            self._thread.call(self.close_async)
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # -- inside ---------------------------------------------------------------------------------------

    async def _request(
        self,
        method: str,
        path: str,
        document: Any = None,
        timeout: float | None = None,
        *,
        retry: bool = False,
        failure_is_data: bool = False,
    ) -> Any:
        """One request to the instance's management API; with `retry`, transient failures are retried."""
        self.keep_alive()
        headers = dict(self._headers)
        if self._fleet_env is not None:
            token = await self._fleet_env.plane.runner_token()
            if token is not None:
                headers["X-Runner-Token"] = token
        deadline = Deadline(self._timeout if timeout is None else timeout)
        url = f"{self._base}{path}"
        reply = await retry_request(
            lambda: send(
                method,
                url,
                timeout=deadline.seconds_left,
                document=document,
                headers=headers,
                failure_is_data=failure_is_data,
            ),
            what=f"{method} {url}",
            deadline=deadline,
            backoff=RETRIES,
            may_retry=lambda error: retry and error.transient,
        )
        return reply.json()

    def keep_alive(self) -> None:
        """Send heartbeats if the plane requires them, from the running loop."""
        interval = self._fleet_env.data.heartbeat_interval if self._fleet_env is not None else None
        if interval is None or self._fleet_env is None or self._fleet_env.is_closed:
            return
        if self._heartbeats is None or self._heartbeats.done() or self._heartbeats.get_loop().is_closed():
            self._heartbeats = asyncio.ensure_future(self._send_heartbeats(self._fleet_env, interval / 3))

    async def _send_heartbeats(self, handle: InstanceHandle, pause: float) -> None:
        while not handle.is_closed:
            try:
                await handle.plane.heartbeat(handle.instance_id, seconds=max(pause, 1.0))
            except FleetError as error:
                self._bus.emit(HeartbeatFailed.of(self._context, error, instance_id=handle.instance_id))
                if isinstance(error, PlaneError) and error.ran is False and not error.transient:
                    return
            await asyncio.sleep(pause)


def _context_for(env_key: str) -> TaskContext:
    ambient = ambient_context()
    if ambient.env_key is not None:
        return ambient
    key, _, version = env_key.partition(":")
    return TaskContext(env_key=key, env_version=version or None)


def _step_result(payload: Any) -> StepResult[Observation]:
    document = payload if isinstance(payload, dict) else {"observation": payload}
    content = document.get("observation", {})
    metadata = content if isinstance(content, dict) else {"content": content}
    reward, done = document.get("reward"), bool(document.get("done", False))
    observation = Observation(metadata=metadata, reward=reward, done=done)
    return StepResult(observation=observation, reward=reward, done=done)


def _to_dict(action: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(action) and not isinstance(action, type):
        return dataclasses.asdict(action)
    if isinstance(action, dict):
        return action
    if hasattr(action, "model_dump"):
        return dict(action.model_dump())
    raise TypeError(f"an action is a dataclass or a dict, not {type(action).__name__}")


def _require_object(payload: Any) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise ProtocolError("the instance answered with something that is not an object")
    return payload
