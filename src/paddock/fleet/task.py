"""A Fleet task as trainers export it: a dict, under either of the names in use for its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddock.errors import TaskError
from paddock.fleet.events import TaskContext

FORMS = '{"tasks": […]}, a list, or a task a line'


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
    """The tasks of a file with `{"tasks": […]}`, a list, or a task a line. Raises TaskError (a ValueError)."""
    try:
        document = read_document(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise TaskError(f"{path} is neither JSON nor JSONL: {error}", hint=f"write {FORMS}") from error
    tasks = document.get("tasks", [document]) if isinstance(document, dict) else document
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise TaskError(f"{path} holds no tasks", hint=f"write {FORMS}")
    return tasks


def read_document(text: str) -> Any:
    """JSON, or the list of what the lines of JSONL hold. Raises ValueError, which names the line."""
    try:
        return json.loads(text)
    except ValueError as whole:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        # One document that is broken, over many lines, is not a file with a document a line.
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
