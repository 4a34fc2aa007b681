"""The JSON form of a task.

| key | what it holds |
|---|---|
| `id` or `task_id` | text or a whole number; may be left out |
| `instruction` | text |
| `files`, `tests`, `solution` | an object of paths; each value is text, `{"text": …}` or `{"base64": …}` |
| `setup` or `setup_shell` | text |
| `verifier` or `test_script` | text, the `test.sh` of `tests` |
| `limits`, `timeouts` | objects with the fields of `SandboxLimits` and `RolloutTimeouts` |
| `image` | the name of an image, or an object with the fields of `TaskImage` |
| `network`, `settings` | objects with the fields of `TaskNetwork` and `TaskSettings` |
| `steps` | a list of objects with the fields of `TaskStep` |
| `metadata` | any object |

A file may say its permission bits, `{"text": …, "mode": "755"}`; they matter for `files` only.
`solution` may also be text, which is then its `solve.sh`. Another key is an error, never ignored.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paddock.errors import TaskError
from paddock.limits import RolloutTimeouts, SandboxLimits
from paddock.tasks.json_values import kind_name, read_content, read_value, unknown_key, write_content, write_value
from paddock.tasks.settings import TaskImage, TaskNetwork, TaskSettings, TaskStep
from paddock.tasks.task import SOLUTION_ENTRY, TEST_ENTRY, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIASES = {"task_id": "id", "setup_shell": "setup", "test_script": "verifier"}
KEYS = (
    *("id", "instruction", "files", "setup", "verifier", "tests", "solution", "limits", "timeouts"),
    *("image", "network", "settings", "steps", "metadata"),
)


def task_from_json(data: Mapping[str, Any], *, source: str = "") -> Task:
    """The task that `data` describes; `source` says in messages where it came from."""
    where = source or "task"
    if not isinstance(data, dict):
        raise TaskError(f"{where}: a task is an object, not {kind_name(data)}", hint='write {"instruction": "…"}')
    document = _with_plain_names(data, where)
    if not source and isinstance(document.get("id"), str):
        where = f"task {document['id']!r}"
    files, modes = _files(document, "files", where)
    tests, _ = _files(document, "tests", where)
    if isinstance(document.get("solution"), str):
        document["solution"] = {SOLUTION_ENTRY: document["solution"]}
    solution, _ = _files(document, "solution", where)
    metadata = document.get("metadata", {})
    if not isinstance(metadata, dict):
        raise TaskError(f"{where}: metadata is {kind_name(metadata)}", hint="write an object")
    return Task(
        instruction=_text(document, "instruction", where),
        id=_id(document.get("id"), where),
        files=files,
        modes=modes,
        setup=_text(document, "setup", where),
        tests=tests,
        solution=solution,
        sandbox=read_value(SandboxLimits, document.get("limits", {}), f"{where}: limits"),
        timeouts=read_value(RolloutTimeouts, document.get("timeouts", {}), f"{where}: timeouts"),
        image=_image(document.get("image"), f"{where}: image"),
        network=read_value(TaskNetwork, document.get("network", {}), f"{where}: network"),
        settings=read_value(TaskSettings, document.get("settings", {}), f"{where}: settings"),
        steps=_steps(document.get("steps", []), f"{where}: steps"),
        metadata=metadata,
        source=source,
        verifier=_text(document, "verifier", where),
    )


def task_to_json(task: Task) -> dict[str, Any]:
    whole = {
        "id": task.id,
        "instruction": task.instruction,
        "files": {path: write_content(data, task.modes.get(path)) for path, data in task.files.items()},
        "setup": task.setup,
        "tests": {path: write_content(data) for path, data in task.tests.items()},
        "solution": {path: write_content(data) for path, data in task.solution.items()},
        "limits": asdict(task.sandbox),
        "timeouts": asdict(task.timeouts),
        "image": write_value(task.image),
        "network": write_value(task.network),
        "settings": write_value(task.settings),
        "steps": write_value(task.steps),
        "metadata": task.metadata,
    }
    return {key: value for key, value in whole.items() if value}


def _with_plain_names(data: dict[str, Any], where: str) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in data.items():
        name = ALIASES.get(key, key)
        if name not in KEYS:
            raise unknown_key(str(key), (*KEYS, *ALIASES), where)
        if name in document:
            raise TaskError(f"{where}: {name!r} is given twice, once as {key!r}", hint="keep one of them")
        if value is not None:
            document[name] = value
    return document


def _id(id: object, where: str) -> str:
    if id is None:
        return ""
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise TaskError(f"{where}: the id is {id!r}", hint="write text, or leave it out")
    return str(id)


def _image(value: object, where: str) -> TaskImage | None:
    if value is None:
        return None
    return TaskImage(name=value) if isinstance(value, str) and value else read_value(TaskImage, value, where)


def _steps(value: object, where: str) -> tuple[TaskStep, ...]:
    if not isinstance(value, list):
        raise TaskError(f"{where} is {kind_name(value)}", hint='write [{"name": "…", "instruction": "…"}]')
    return tuple(read_value(TaskStep, item, f"{where}[{number}]") for number, item in enumerate(value))


def _text(document: dict[str, Any], key: str, where: str) -> str:
    value = document.get(key, "")
    if not isinstance(value, str):
        raise TaskError(f"{where}: {key} is {kind_name(value)}, not text", hint=f'write "{key}": "…"')
    return value


def _files(document: dict[str, Any], key: str, where: str) -> tuple[dict[str, bytes], dict[str, int]]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        hint = f'write {{"{TEST_ENTRY}": "…"}}' if key == "tests" else 'write {"path": "text"}'
        raise TaskError(f"{where}: {key} is {kind_name(value)}, not an object of files", hint=hint)
    files: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    for path, content in value.items():
        place = f"{where}: {key}: {path}"
        files[path] = read_content(content, place)
        if isinstance(content, dict) and content.get("mode") is not None:
            modes[path] = _mode(content["mode"], place)
    return files, modes


def _mode(mode: object, where: str) -> int:
    try:
        return int(mode, 8)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise TaskError(f"{where}: the mode is {mode!r}", hint='write octal digits as text, such as "755"') from None
