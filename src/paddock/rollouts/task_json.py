"""The JSON form of a task.

| key | what it holds |
|---|---|
| `id` or `task_id` | text or a whole number; may be left out |
| `instruction` | text |
| `files`, `tests`, `solution` | an object of paths; each value is text, `{"text": …}` or `{"base64": …}` |
| `setup` or `setup_shell` | text |
| `verifier` or `test_script` | text, the `test.sh` of `tests` |
| `limits`, `timeouts` | objects with the fields of `SandboxLimits` and `Timeouts` |
| `metadata` | any object |

A file may say its permission bits, `{"text": …, "mode": "755"}`; they matter for `files` only.
`solution` may also be text, which is then its `solve.sh`. Another key is an error, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import difflib
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import ConfigError, TaskError
from paddock.rollouts.limits import SandboxLimits, Timeouts
from paddock.rollouts.task import SOLUTION_ENTRY, TEST_ENTRY, Task, encoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALIASES = {"task_id": "id", "setup_shell": "setup", "test_script": "verifier"}
KEYS = ("id", "instruction", "files", "setup", "verifier", "tests", "solution", "limits", "timeouts", "metadata")
INTEGERS = {"memory_bytes", "cpus", "processes", "disk_bytes", "output_bytes"}
OPTIONAL = {"cpus"}

Values = TypeVar("Values", SandboxLimits, Timeouts)


def task_from_json(data: Mapping[str, Any], *, source: str = "") -> Task:
    """The task that `data` describes; `source` says in messages where it came from."""
    where = source or "task"
    if not isinstance(data, dict):
        raise TaskError(f"{where}: a task is an object, not {_kind(data)}", hint='write {"instruction": "…"}')
    given = _with_plain_names(data, where)
    if not source and isinstance(given.get("id"), str):
        where = f"task {given['id']!r}"
    files, modes = _files(given, "files", where)
    tests, _ = _files(given, "tests", where)
    if isinstance(given.get("solution"), str):
        given["solution"] = {SOLUTION_ENTRY: given["solution"]}
    solution, _ = _files(given, "solution", where)
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict):
        raise TaskError(f"{where}: metadata is {_kind(metadata)}", hint="write an object")
    return Task(
        instruction=_text(given, "instruction", where),
        id=_id(given.get("id"), where),
        files=files,
        modes=modes,
        setup=_text(given, "setup", where),
        tests=tests,
        solution=solution,
        sandbox=_values(SandboxLimits, given.get("limits"), f"{where}: limits"),
        timeouts=_values(Timeouts, given.get("timeouts"), f"{where}: timeouts"),
        metadata=metadata,
        source=source,
        verifier=_text(given, "verifier", where),
    )


def task_to_json(task: Task) -> dict[str, Any]:
    whole = {
        "id": task.id,
        "instruction": task.instruction,
        "files": {path: _written(data, task.modes.get(path)) for path, data in task.files.items()},
        "setup": task.setup,
        "tests": {path: _written(data) for path, data in task.tests.items()},
        "solution": {path: _written(data) for path, data in task.solution.items()},
        "limits": asdict(task.sandbox),
        "timeouts": asdict(task.timeouts),
        "metadata": task.metadata,
    }
    return {key: value for key, value in whole.items() if value}


def unknown_key(key: str, known: Iterable[str], where: str) -> TaskError:
    """The error for a key that means nothing here, with the one that was probably meant."""
    close = difflib.get_close_matches(key, list(known), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return TaskError(f"{where}: unknown key {key!r}", hint=hint)


def _with_plain_names(data: dict[str, Any], where: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in data.items():
        name = ALIASES.get(key, key)
        if name not in KEYS:
            raise unknown_key(str(key), (*KEYS, *ALIASES), where)
        if name in given:
            raise TaskError(f"{where}: {name!r} is given twice, once as {key!r}", hint="keep one of them")
        if value is not None:
            given[name] = value
    return given


def _id(given: object, where: str) -> str:
    if given is None:
        return ""
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise TaskError(f"{where}: the id is {given!r}", hint="write text, or leave it out")
    return str(given)


def _text(given: dict[str, Any], key: str, where: str) -> str:
    value = given.get(key, "")
    if not isinstance(value, str):
        raise TaskError(f"{where}: {key} is {_kind(value)}, not text", hint=f'write "{key}": "…"')
    return value


def _files(given: dict[str, Any], key: str, where: str) -> tuple[dict[str, bytes], dict[str, int]]:
    value = given.get(key, {})
    if not isinstance(value, dict):
        hint = f'write {{"{TEST_ENTRY}": "…"}}' if key == "tests" else 'write {"path": "text"}'
        raise TaskError(f"{where}: {key} is {_kind(value)}, not an object of files", hint=hint)
    files: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    for path, content in value.items():
        place = f"{where}: {key}: {path}"
        files[path] = _content(content, place)
        if isinstance(content, dict) and content.get("mode") is not None:
            modes[path] = _mode(content["mode"], place)
    return files, modes


def _content(given: object, where: str) -> bytes:
    if isinstance(given, str):
        return encoded(given, where)
    if not isinstance(given, dict):
        raise TaskError(f"{where} is {_kind(given)}", hint='write text, {"text": …} or {"base64": …}')
    for key in given:
        if key not in ("text", "base64", "mode"):
            raise unknown_key(str(key), ("text", "base64", "mode"), where)
    held = [given[key] for key in ("text", "base64") if key in given]
    if len(held) != 1 or not isinstance(held[0], str):
        raise TaskError(f"{where} has no content, or two", hint='write one of {"text": "…"} and {"base64": "…"}')
    if "text" in given:
        return encoded(held[0], where)
    try:
        return base64.b64decode(held[0], validate=True)
    except (binascii.Error, ValueError):
        raise TaskError(f"{where}: the base64 text is broken", hint="encode the file again") from None


def _mode(given: object, where: str) -> int:
    try:
        return int(given, 8)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise TaskError(f"{where}: the mode is {given!r}", hint='write octal digits as text, such as "755"') from None


def _values(kind: type[Values], given: object, where: str) -> Values:
    if given is None:
        return kind()
    if not isinstance(given, dict):
        raise TaskError(f"{where} is {_kind(given)}", hint="write an object")
    names = [field.name for field in fields(kind)]
    for key, value in given.items():
        if key not in names:
            raise unknown_key(str(key), names, where)
        wanted = int if key in INTEGERS else int | float
        if (value is None and key in OPTIONAL) or (isinstance(value, wanted) and not isinstance(value, bool)):
            continue
        number = "a whole number" if key in INTEGERS else "a number"
        raise TaskError(f"{where}: {key} is {value!r}, not {number}", hint=f"write {number} above 0")
    try:
        return kind(**given)
    except ConfigError as error:
        raise TaskError(f"{where}: {error}", hint=error.hint) from error


def _written(data: bytes, mode: int | None = None) -> str | dict[str, str]:
    try:
        written: dict[str, str] = {"text": data.decode()}
    except UnicodeDecodeError:
        written = {"base64": base64.b64encode(data).decode()}
    if mode is not None:
        written["mode"] = f"{mode:o}"
    return written["text"] if list(written) == ["text"] else written


def _kind(value: object) -> str:
    names = {
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
