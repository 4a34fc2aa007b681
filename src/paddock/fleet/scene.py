"""A fleet task as a scene of the tool-calling loop: an instance, its tools, the task's verifier."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paddock.fleet.errors import FleetError, InstanceGone
from paddock.fleet.modality import SUBMIT
from paddock.fleet.task_env import FleetTaskEnv
from paddock.rollouts.loop.tools import Part, ToolResult, is_part
from paddock.rollouts.outcome import Reward

if TYPE_CHECKING:
    from paddock.fleet.settings import PlaneAddress

EXPIRED = "instance_expired"
PLANE_BROKE = ("verifier_exception", "no_fleet_env")
"""The verifier was not run: what is said about it is nothing about the work."""


class FleetScene:
    """Made for one rollout. It is its own `Tools`."""

    kind = "fleet"

    def __init__(self, task: dict[str, Any], plane: PlaneAddress, *, max_steps: int = 50, **options: Any) -> None:
        """`options` are those of `FleetTaskEnv`."""
        # One step more than the loop may take: its last one says that the agent is done.
        self._env = FleetTaskEnv(task, plane.api_key, base_url=plane.base_url, max_steps=max_steps + 1, **options)
        self._first: dict[str, Any] = {}
        self._last_action: dict[str, Any] = {"done": True}
        self._graded = False
        self._found: dict[str, Any] = {}
        self.is_scored = bool(task.get("verifier_code") or task.get("verifier_func"))
        self.verifier_log = ""

    # -- a scene --------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._env.provision_async()
        self._found = {
            "instance_id": self._env.instance_id,
            "provisioning_time_s": round(self._env.provisioning_time_s or 0.0, 4),
        }
        if (instance := self._env.instance) is not None:
            self._found["env_version"] = instance.version

    async def tools(self) -> FleetScene:
        self._first = await self._env.reset_async()
        if self._env.reset_error is not None:
            self._found["reset_error"] = self._env.reset_error
        return self

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """Raises InstanceGone when there is nothing left to look at, FleetError when the plane cannot grade."""
        self._env.conversation_messages = messages
        _, reward, _, info = await self._env.step_async(self._last_action)
        self._graded = True
        self.verifier_log = info.get("verifier_stdout") or ""
        reason, error = info.get("failure_reason"), info.get("verifier_error")
        if reason == EXPIRED:
            raise InstanceGone(error or "the instance ended before its work was graded")
        if reason in PLANE_BROKE:
            raise FleetError(f"the plane could not grade the work: {error or reason}")
        if reason is not None:
            self._found["failure_reason"] = reason
        if reward is None:
            return Reward.unknown(f"{reason or 'unknown'}: {error}" if error else reason or "no grade")
        return Reward(reward)

    async def close(self) -> None:
        # An episode that broke or was cancelled is not graded any more: it only ends.
        await self._env.__aexit__(None if self._graded else asyncio.CancelledError)

    @property
    def evidence(self) -> dict[str, Any]:
        return dict(self._found)

    # -- its tools ------------------------------------------------------------------------------------

    @property
    def prompt(self) -> str | list[Part]:
        seen = [part for part in self._first.get("initial_screenshot") or () if is_part(part)]
        return [{"type": "text", "text": self._env.prompt}, *seen] if seen else self._env.prompt

    async def list_tools(self) -> list[dict[str, Any]]:
        return list(self._first.get("tools") or ())

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Raises InstanceGone."""
        if name == SUBMIT:
            self._last_action = {"tool": name, "params": arguments, "done": True}
            return ToolResult.of_text("Answer recorded.", done=True)
        seen, _, done, info = await self._env.step_async({"tool": name, "params": arguments})
        if info.get("failure_reason") == EXPIRED:
            raise InstanceGone(info.get("tool_error") or "the instance ended during the episode")
        return ToolResult.of_value(seen["observation"], is_error="tool_error" in info, done=done)
