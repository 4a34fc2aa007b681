"""Environments hosted by a fleet: make an instance, give an agent its tools, grade what it did, end it.

    env = FleetTaskEnv(task_config)                  # FLEET_API_KEY and FLEET_BASE_URL say where
    observation = await env.reset_async()
    observation, reward, done, info = await env.step_async({"tool": "search", "params": {…}})
    await env.close_async()

Names are imported when they are first used, so that a light part does not pay for a heavy one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.lazy import lazy_exports

if TYPE_CHECKING:
    from paddock.fleet.client.context import CONTEXT_TOOL_NAMES as CONTEXT_TOOL_NAMES
    from paddock.fleet.client.context import CONTEXT_TOOLS as CONTEXT_TOOLS
    from paddock.fleet.client.context import ContextManager as ContextManager
    from paddock.fleet.client.env_client import FleetEnvClient as FleetEnvClient
    from paddock.fleet.client.events import clear_task_context as clear_task_context
    from paddock.fleet.client.events import configure_fleet_telemetry as configure_fleet_telemetry
    from paddock.fleet.client.events import set_task_context as set_task_context
    from paddock.fleet.client.jobs import TaskEvaluator as TaskEvaluator
    from paddock.fleet.client.jobs import create_trace_job as create_trace_job
    from paddock.fleet.client.jobs import evaluate_task as evaluate_task
    from paddock.fleet.client.jobs import upload_trace as upload_trace
    from paddock.fleet.client.leases import close_all as close_all
    from paddock.fleet.client.leases import sweep as sweep
    from paddock.fleet.client.models import CallToolAction as CallToolAction
    from paddock.fleet.client.models import ListToolsAction as ListToolsAction
    from paddock.fleet.client.task_env import FleetTaskEnv as FleetTaskEnv
    from paddock.fleet.client.task_env import make_fleet_task_env as make_fleet_task_env
    from paddock.fleet.client.tools import FleetMCPTools as FleetMCPTools

_MODULES = {
    "CONTEXT_TOOLS": "paddock.fleet.client.context",
    "CONTEXT_TOOL_NAMES": "paddock.fleet.client.context",
    "CallToolAction": "paddock.fleet.client.models",
    "ContextManager": "paddock.fleet.client.context",
    "FleetEnvClient": "paddock.fleet.client.env_client",
    "FleetMCPTools": "paddock.fleet.client.tools",
    "FleetTaskEnv": "paddock.fleet.client.task_env",
    "ListToolsAction": "paddock.fleet.client.models",
    "TaskEvaluator": "paddock.fleet.client.jobs",
    "clear_task_context": "paddock.fleet.client.events",
    "close_all": "paddock.fleet.client.leases",
    "configure_fleet_telemetry": "paddock.fleet.client.events",
    "create_trace_job": "paddock.fleet.client.jobs",
    "evaluate_task": "paddock.fleet.client.jobs",
    "make_fleet_task_env": "paddock.fleet.client.task_env",
    "set_task_context": "paddock.fleet.client.events",
    "sweep": "paddock.fleet.client.leases",
    "upload_trace": "paddock.fleet.client.jobs",
}
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
