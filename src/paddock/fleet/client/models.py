"""Instances of the control plane and actions of an agent, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paddock.fleet.client.errors import ProtocolError

ENDED = frozenset(("stopped", "error"))
ALIVE = frozenset(("pending", "running"))


@dataclass(slots=True)
class ListToolsAction:
    """The tools of an agent, in OpenAI format."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(slots=True, init=False)
class CallToolAction:
    """One tool call of an agent. `arguments` is another name for `parameters`."""

    tool_name: str
    parameters: dict[str, Any]
    metadata: dict[str, Any]

    def __init__(
        self,
        tool_name: str = "",
        parameters: dict[str, Any] | None = None,
        *,
        arguments: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Raises TypeError if both names are given."""
        if parameters is not None and arguments is not None:
            raise TypeError("parameters and arguments are the same thing: pass one of them")
        self.tool_name = tool_name
        self.parameters = (parameters if parameters is not None else arguments) or {}
        self.metadata = metadata or {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The parameters, under the name that MCP has for them."""
        return self.parameters


@dataclass(frozen=True, slots=True)
class InstanceUrls:
    root: str
    """Ends in `/`."""
    manager: str
    """Does not end in `/`."""

    def mcp(self, image_type: str | None) -> tuple[str, ...]:
        """The endpoints that may offer tools: the aggregator, and for a standard image the application's own."""
        aggregator = f"{self.root}api/v1/mcp"
        return (aggregator,) if image_type == "mcp" else (f"{self.root}mcp", aggregator)


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as the control plane describes it."""

    instance_id: str
    env_key: str
    version: str
    status: str
    urls: InstanceUrls | None = None
    run_id: str | None = None
    heartbeat_interval: float | None = None
    request_id: str | None = None
    """The `X-Request-ID` of its create, if the plane returns it."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def read_instance(document: Any) -> Instance:
    """Raises ProtocolError when it is not an instance."""
    if not isinstance(document, dict) or not isinstance(document.get("instance_id"), str):
        raise ProtocolError("the control plane answered with something that is not an instance")
    interval = document.get("heartbeat_interval")
    return Instance(
        instance_id=document["instance_id"],
        env_key=str(document.get("env_key", "")),
        version=str(document.get("version", "")),
        status=str(document.get("status", "")),
        urls=_read_urls(document.get("urls")),
        run_id=document.get("run_id"),
        request_id=document.get("request_id"),
        heartbeat_interval=float(interval) if isinstance(interval, int | float) and interval > 0 else None,
    )


def _read_urls(document: Any) -> InstanceUrls | None:
    manager = document.get("manager") if isinstance(document, dict) else None
    if not isinstance(manager, dict):
        return None
    root, api = document.get("root"), manager.get("api")
    if not isinstance(root, str) or not isinstance(api, str):
        return None
    return InstanceUrls(root if root.endswith("/") else f"{root}/", api.rstrip("/"))
