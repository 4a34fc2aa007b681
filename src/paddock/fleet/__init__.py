"""Environments hosted by a fleet: make an instance, give an agent its tools, grade what it did, end it.

    env = FleetTaskEnv(task_config)                  # FLEET_API_KEY and FLEET_BASE_URL say where
    observation = await env.reset_async()
    observation, reward, done, info = await env.step_async({"tool": "search", "params": {…}})
    await env.close_async()

Names are imported when they are first used, so that a light part does not pay for a heavy one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.fleet.client import FleetEnvClient as FleetEnvClient
    from paddock.fleet.context import CONTEXT_TOOL_NAMES as CONTEXT_TOOL_NAMES
    from paddock.fleet.context import CONTEXT_TOOLS as CONTEXT_TOOLS
    from paddock.fleet.context import ContextManager as ContextManager
    from paddock.fleet.evaluation import TaskEvaluator as TaskEvaluator
    from paddock.fleet.evaluation import evaluate_task as evaluate_task
    from paddock.fleet.events import clear_task_context as clear_task_context
    from paddock.fleet.events import configure_fleet_telemetry as configure_fleet_telemetry
    from paddock.fleet.events import set_task_context as set_task_context
    from paddock.fleet.leases import close_all as close_all
    from paddock.fleet.leases import sweep as sweep
    from paddock.fleet.models import CallToolAction as CallToolAction
    from paddock.fleet.models import ListToolsAction as ListToolsAction
    from paddock.fleet.task_env import FleetTaskEnv as FleetTaskEnv
    from paddock.fleet.task_env import make_fleet_task_env as make_fleet_task_env
    from paddock.fleet.tools import FleetMCPTools as FleetMCPTools
    from paddock.fleet.trace import create_trace_job as create_trace_job
    from paddock.fleet.trace import upload_trace as upload_trace

_HOMES = {
    "CONTEXT_TOOLS": "context",
    "CONTEXT_TOOL_NAMES": "context",
    "CallToolAction": "models",
    "ContextManager": "context",
    "FleetEnvClient": "client",
    "FleetMCPTools": "tools",
    "FleetTaskEnv": "task_env",
    "ListToolsAction": "models",
    "TaskEvaluator": "evaluation",
    "clear_task_context": "events",
    "close_all": "leases",
    "configure_fleet_telemetry": "events",
    "create_trace_job": "trace",
    "evaluate_task": "evaluation",
    "make_fleet_task_env": "task_env",
    "set_task_context": "events",
    "sweep": "leases",
    "upload_trace": "trace",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"paddock.fleet.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
