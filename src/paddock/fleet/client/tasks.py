"""A Fleet task as trainers export it: a dict whose fields have one of two names; and what its modality means.

The modality decides about tools, image and time to live.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddock.errors import TaskError
from paddock.fleet.client.errors import ToolsUnavailable
from paddock.fleet.client.events import TaskContext

FILE_FORMATS = '{"tasks": […]}, a list, or a task a line'


class TaskView:
    """A read-only view of a task config."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task

    @property
    def task_key(self) -> str:
        """The key of the task; `unknown` if it has none."""
        return str(self.task.get("task_key") or self.task.get("key") or "unknown")

    @property
    def prompt(self) -> str:
        """What the agent is asked to do."""
        return str(self.task.get("prompt") or "")

    @property
    def modality(self) -> str:
        """`tool_use`, or a modality with a screen."""
        return str(self.task.get("task_modality") or "tool_use")

    @property
    def env_key(self) -> str:
        """The key of the environment that the task needs."""
        return str(self.task.get("env_key") or self.task.get("env_id") or "unknown")

    @property
    def env_version(self) -> str | None:
        """The version of that environment; None leaves it to the plane."""
        return self.task.get("env_version") or self.task.get("version")

    @property
    def env_spec(self) -> str:
        """`key` or `key:version`. Raises TaskError when the task names no environment."""
        if self.env_key == "unknown":
            raise TaskError("Task config missing env_key", hint="name the environment of the task")
        return f"{self.env_key}:{self.env_version}" if self.env_version else self.env_key

    @property
    def context(self) -> TaskContext:
        """The attributes of the task's events."""
        return TaskContext(self.env_key, self.env_version, self.task_key, self.modality)


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """The tasks of a file with `{"tasks": […]}`, a list, or a task a line. Raises TaskError (a ValueError)."""
    try:
        document = read_document(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise TaskError(f"{path} is neither JSON nor JSONL: {error}", hint=f"write {FILE_FORMATS}") from error
    tasks = document.get("tasks", [document]) if isinstance(document, dict) else document
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise TaskError(f"{path} holds no tasks", hint=f"write {FILE_FORMATS}")
    return tasks


def read_document(text: str) -> Any:
    """A JSON document, or the list of the documents of JSONL. Raises ValueError, which names the line."""
    try:
        return json.loads(text)
    except ValueError as whole:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        # A broken JSON document over many lines is not JSONL.
        if not lines or not lines[0][1].rstrip().endswith("}"):
            raise
        try:
            return [_read_line(number, line) for number, line in lines]
        except ValueError as error:
            raise (error if len(lines) > 1 else whole) from None


def _read_line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def find_task(path: str | Path, task_key: str) -> dict[str, Any]:
    """The task of that key from a file. Raises TaskError."""
    for task in read_tasks(path):
        if task_key in (task.get("task_key"), task.get("key")):
            return task
    raise TaskError(f"Task '{task_key}' not found in {path}")


COMPUTER_TOOL = "computer"
SCREEN_MODALITIES = frozenset(("computer_use", "browser_use"))
SCREEN_TTL_SECONDS = 1800
TTL_SECONDS = 900
SUBMIT_TOOL_NAME = "submit_final_answer"
SUBMIT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": SUBMIT_TOOL_NAME,
        "description": "Submit your final answer. This ends the session.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer"}},
            "required": ["answer"],
        },
    },
}


class ComputerToolMissing(ToolsUnavailable):
    code = "FLEET_COMPUTER_TOOL_MISSING"


def has_screen(modality: str) -> bool:
    return modality in SCREEN_MODALITIES


def time_to_live(modality: str) -> int:
    return SCREEN_TTL_SECONDS if has_screen(modality) else TTL_SECONDS


def is_wanted(modality: str, name: str) -> bool:
    """Tasks with a screen use the computer and nothing else; other tasks use anything else."""
    return (name == COMPUTER_TOOL) == has_screen(modality)


def select_tools(modality: str, prompt: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that an agent of this modality gets. Raises ToolsUnavailable when none is left."""
    selected = [tool for tool in tools if is_wanted(modality, tool["function"]["name"])]
    if not selected:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        if has_screen(modality):
            raise ComputerToolMissing(
                f"{modality} needs the tool {COMPUTER_TOOL!r}; available: {names}",
                hint="is this an image with a screen?",
            )
        raise ToolsUnavailable(f"no tools for {modality}; available: {names}")
    if modality == "tool_use" and SUBMIT_TOOL_NAME in prompt:
        selected.append(SUBMIT_TOOL)
    return selected
