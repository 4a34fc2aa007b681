"""One run of a verifier, in the process that was made for it.

Reads the request, copies the databases into memory, shuts itself in, and only then touches the verifier's code.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
import linecache
import math
import os
import pickle
import re
import socket
import string
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Set
from typing import Any

from paddock.fleet.instance.verifier import NOT_RUN, handle, names, stand_in

FILE = "verifier.py"
MOST_RESULT = 15 * 1024 * 1024
MOST_STDOUT = 1024 * 1024
MOST_TEXT = 8_000
MOST_TRACEBACK = 32_000
MOST_DEPTH = 200


def run(connection: int, shut_in: Callable[[], None]) -> int:
    """Carry out the request that comes through `connection`; the code to exit with."""
    line = socket.socket(fileno=connection)
    request = json.loads(_first_line(line))
    sys.stdout = LimitedOutput()
    try:
        databases = {name: handle.open_copy(name, path) for name, path in request["databases"].items()}
        shut_in()
    except Exception as error:
        line.sendall(encoded(_described(error)))
        return NOT_RUN
    try:
        answer = encoded({"success": True, "result": _verify(request, databases), "error": None})
    except BaseException as error:
        # A verifier may raise SystemExit or KeyboardInterrupt; all of it is its answer.
        answer = encoded({"success": False, "result": None, "error": _described(error)})
    sys.stdout.flush()
    line.sendall(answer)
    return 0


def _verify(request: dict[str, Any], databases: dict[str, handle.Database]) -> Any:
    arguments, keywords = read_arguments(request["args"], request["args_array"])
    code, name = request["code"], request["function_name"]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    stand_in.install(NAMES)
    namespace: dict[str, Any] = {**NAMES, "__name__": "verifier", "__file__": FILE}
    exec(compile(code, FILE, "exec", dont_inherit=True), namespace)
    function = namespace.get(name)
    if not callable(function):
        raise NameError(f"{FILE} defines no function {name!r}")
    handle.results_are_awaitable(inspect.iscoroutinefunction(function))
    result = function(handle.EnvironmentHandle(databases, request["about"]), *arguments, **keywords)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


NAMES: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "normalized_contains": names.normalized_contains,
    "normalized_string_comparison": names.normalized_string_comparison,
    "extract_numbers": names.extract_numbers,
    "contains_number": names.contains_number,
    "IgnoreConfig": handle.IgnoreConfig,
    "DatabaseSnapshot": handle.Database,
    "SnapshotDiff": handle.SnapshotDiff,
    "Environment": handle.EnvironmentHandle,
    "verifier": stand_in.verifier,
    "json": json,
    "re": re,
    "string": string,
    **{
        name: getattr(typing, name)
        for name in ("Any", "Callable", "Dict", "List", "Optional", "Set", "Tuple", "Union")
    },
}
"""What a verifier finds without importing it."""


class LimitedOutput(io.TextIOBase):
    """Standard output up to a limit; what comes after is passed by, so a talkative verifier is not held up."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._left = MOST_STDOUT + 1

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            data = text.encode(errors="replace")[: self._left]
            self._left -= len(data)
            while data:
                data = data[os.write(1, data) :]
        return len(text)


# -- arguments ----------------------------------------------------------------------------------------


class DataUnpickler(pickle.Unpickler):
    """Numbers, text, lists and the like. A pickle that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"arguments must be plain data, but they name {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("arguments must be plain data")


def read_arguments(blob: str | None, array: list[Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, without the place of `env` before them and its name behind them."""
    if blob:
        given = DataUnpickler(io.BytesIO(base64.b64decode(blob, validate=True))).load()
        arguments, keywords = list(given.get("args") or ()), dict(given.get("kwargs") or {})
        if arguments and arguments[0] is None:
            del arguments[0]
    else:
        arguments, keywords = list(array or ()), {}
    if arguments and isinstance(arguments[-1], dict) and arguments[-1].keys() == {"env"}:
        del arguments[-1]
    return arguments, keywords


# -- the answer ---------------------------------------------------------------------------------------


def encoded(answer: dict[str, Any]) -> bytes:
    """One line of JSON. Raises TypeError or ValueError for a result that JSON cannot say."""
    text = json.dumps(plain(answer), allow_nan=False)
    if len(text) > MOST_RESULT:
        raise ValueError(f"the verifier's result takes {len(text)} bytes, {MOST_RESULT} are allowed")
    return text.encode() + b"\n"


def plain(value: Any, depth: int = 0) -> Any:
    """The value in JSON's own types. An object with a `score` is known by that."""
    if depth > MOST_DEPTH:
        raise ValueError("the verifier's result is nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int):
        # Readers of JSON take larger ones for floats, or refuse them.
        return int(value) if -(2**63) <= value < 2**64 else float(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(member, depth + 1) for key, member in value.items()}
    if isinstance(value, (list, tuple, Set)):
        return [plain(member, depth + 1) for member in value]
    for attribute in ("tolist", "model_dump"):
        if callable(method := getattr(value, attribute, None)):
            return plain(method(), depth + 1)
    if hasattr(value, "score"):
        return {"score": plain(value.score, depth + 1)}
    raise TypeError(f"a verifier returns a number or what JSON can say, not {type(value).__name__}")


def _described(error: BaseException) -> dict[str, Any]:
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != FILE:
        found = found.tb_next
    lines = traceback.format_exception(type(error), error, found, limit=50, chain=False)
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be read"
    return {
        "type": type(error).__name__[:200],
        "message": message[:MOST_TEXT],
        "traceback": "".join(lines)[-MOST_TRACEBACK:],
    }


def _first_line(line: socket.socket) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = line.recv(1 << 20)
        if not part:
            raise EOFError("the request broke off")
        parts.append(part)
    return b"".join(parts)
