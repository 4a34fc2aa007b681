"""A Fleet task as trainers export it: a dict, under either of the names in use for its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddock.errors import TaskError
from paddock.fleet.events import TaskContext


class TaskView:
    """Reads a task config. Changes nothing in it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task

    @property
    def task_key(self) -> str:
        return str(self.task.get("task_key") or self.task.get("key") or "unknown")

    @property
    def prompt(self) -> str:
        return str(self.task.get("prompt") or "")

    @property
    def modality(self) -> str:
        return str(self.task.get("task_modality") or "tool_use")

    @property
    def env_key(self) -> str:
        return str(self.task.get("env_key") or self.task.get("env_id") or "unknown")

    @property
    def env_version(self) -> str | None:
        return self.task.get("env_version") or self.task.get("version")

    @property
    def env_spec(self) -> str:
        """`key` or `key:version`. Raises TaskError when the task names no environment."""
        if self.env_key == "unknown":
            raise TaskError("Task config missing env_key", hint="name the environment of the task")
        return f"{self.env_key}:{self.env_version}" if self.env_version else self.env_key

    @property
    def context(self) -> TaskContext:
        return TaskContext(self.env_key, self.env_version, self.task_key, self.modality)


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """The tasks of a file with `{"tasks": […]}` or a list. Raises TaskError (a ValueError)."""
    try:
        document = json.loads(Path(path).read_text())
    except ValueError as error:
        raise TaskError(f"{path} is not JSON: {error}") from error
    tasks = document.get("tasks") if isinstance(document, dict) else document
    if not isinstance(tasks, list):
        raise TaskError(f"{path} holds no tasks", hint='write {"tasks": […]} or a list')
    return tasks


def find_task(path: str | Path, task_key: str) -> dict[str, Any]:
    """The task of that key from a file. Raises TaskError."""
    for task in read_tasks(path):
        if task_key in (task.get("task_key"), task.get("key")):
            return task
    raise TaskError(f"Task '{task_key}' not found in {path}")
