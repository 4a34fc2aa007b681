"""One run of a verifier, in a process of its own.

Reads the request, copies the databases into memory, restricts itself, and only then runs the verifier's code. Also
here: the helper functions that verifiers call by name, and a stub of the `fleet` package that they import.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.abc
import importlib.machinery
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
from types import ModuleType
from typing import Any

from paddock.fleet.instance.verifier import EXIT_NOT_RUN
from paddock.fleet.instance.verifier.environment import VerifierDatabase, VerifierEnvironment, copy_database
from paddock.fleet.instance.verifier.expectations import IgnoreConfig, SnapshotDiff
from paddock.fleet.instance.verifier.queries import make_results_awaitable

FILE = "verifier.py"
MAX_RESULT_BYTES = 15 * 1024 * 1024
MAX_STDOUT_BYTES = 1024 * 1024
MAX_MESSAGE_CHARS = 8_000
MAX_TRACEBACK_CHARS = 32_000
MAX_DEPTH = 200


def run(descriptor: int, restrict: Callable[[], None]) -> int:
    """Read the request from the socket `descriptor`, run it, and write the answer. Returns the exit code."""
    connection = socket.socket(fileno=descriptor)
    request = json.loads(_read_line(connection))
    sys.stdout = LimitedOutput()
    try:
        databases = {name: copy_database(name, path) for name, path in request["databases"].items()}
        restrict()
    except Exception as error:
        connection.sendall(encode_answer(_describe_error(error)))
        return EXIT_NOT_RUN
    try:
        answer = encode_answer({"success": True, "result": _verify(request, databases), "error": None})
    except BaseException as error:
        # BaseException: SystemExit and KeyboardInterrupt of a verifier are answers too.
        answer = encode_answer({"success": False, "result": None, "error": _describe_error(error)})
    sys.stdout.flush()
    connection.sendall(answer)
    return 0


def _verify(request: dict[str, Any], databases: dict[str, VerifierDatabase]) -> Any:
    arguments, keywords = read_arguments(request["args"], request["args_array"])
    code, name = request["code"], request["function_name"]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    install_fleet_stub(NAMES)
    namespace: dict[str, Any] = {**NAMES, "__name__": "verifier", "__file__": FILE}
    exec(compile(code, FILE, "exec", dont_inherit=True), namespace)
    function = namespace.get(name)
    if not callable(function):
        raise NameError(f"{FILE} defines no function {name!r}")
    make_results_awaitable(inspect.iscoroutinefunction(function))
    result = function(VerifierEnvironment(databases, request["attributes"]), *arguments, **keywords)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


class LimitedOutput(io.TextIOBase):
    """Standard output up to a limit; the rest is dropped, so that a verifier never blocks on a full pipe."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._bytes_left = MAX_STDOUT_BYTES + 1

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._bytes_left > 0:
            data = text.encode(errors="replace")[: self._bytes_left]
            self._bytes_left -= len(data)
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
    """Positional and keyword arguments, without the placeholder of `env` before them and its id behind them."""
    if blob:
        document = DataUnpickler(io.BytesIO(base64.b64decode(blob, validate=True))).load()
        arguments, keywords = list(document.get("args") or ()), dict(document.get("kwargs") or {})
        if arguments and arguments[0] is None:
            del arguments[0]
    else:
        arguments, keywords = list(array or ()), {}
    if arguments and isinstance(arguments[-1], dict) and arguments[-1].keys() == {"env"}:
        del arguments[-1]
    return arguments, keywords


# -- the answer ---------------------------------------------------------------------------------------


def encode_answer(answer: dict[str, Any]) -> bytes:
    """One line of JSON. Raises TypeError or ValueError for a result that JSON cannot express."""
    text = json.dumps(to_json_value(answer), allow_nan=False)
    if len(text) > MAX_RESULT_BYTES:
        raise ValueError(f"the verifier's result takes {len(text)} bytes, {MAX_RESULT_BYTES} are allowed")
    return text.encode() + b"\n"


def to_json_value(value: Any, depth: int = 0) -> Any:
    """The value in JSON's own types. An object with a `score` becomes `{"score": …}`."""
    if depth > MAX_DEPTH:
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
        return {str(key): to_json_value(member, depth + 1) for key, member in value.items()}
    if isinstance(value, (list, tuple, Set)):
        return [to_json_value(member, depth + 1) for member in value]
    for attribute in ("tolist", "model_dump"):
        if callable(method := getattr(value, attribute, None)):
            return to_json_value(method(), depth + 1)
    if hasattr(value, "score"):
        return {"score": to_json_value(value.score, depth + 1)}
    raise TypeError(f"a verifier returns a number or a JSON value, not {type(value).__name__}")


def _describe_error(error: BaseException) -> dict[str, Any]:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != FILE:
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame, limit=50, chain=False)
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be read"
    return {
        "type": type(error).__name__[:200],
        "message": message[:MAX_MESSAGE_CHARS],
        "traceback": "".join(lines)[-MAX_TRACEBACK_CHARS:],
    }


def _read_line(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(1 << 20)
        if not part:
            raise EOFError("the request is incomplete")
        parts.append(part)
    return b"".join(parts)


# -- helpers that verifiers call by name: loose comparison of text and numbers ---------------------------

_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
_NUMBER = re.compile(r"-?\d+\.?\d*")


def normalized_contains(target: str, blob: Any) -> bool:
    """Whether `target` is in `blob`, apart from case, punctuation and spaces."""
    return _normalized(target) in _normalized(blob)


def normalized_string_comparison(target: str, blob: Any) -> bool:
    """Whether `target` is `blob`, apart from case, punctuation and spaces."""
    return _normalized(target) == _normalized(blob)


def extract_numbers(text: Any) -> list[float]:
    """Every number in a text; commas inside numbers do not matter."""
    return [float(number) for number in _NUMBER.findall(str(text).replace(",", ""))]


def contains_number(text: Any, target_number: Any) -> bool:
    """Whether one of the numbers in `text` is `target_number`."""
    try:
        wanted = float(str(target_number).replace(",", ""))
    except ValueError:
        return False
    return wanted in extract_numbers(text)


def _normalized(value: Any) -> str:
    text = json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
    return "".join(text.lower().translate(_SPACES).split())


# -- a stub of the `fleet` package, which verifiers import -----------------------------------------------

PACKAGE = "fleet"


def verifier(*arguments: Any, **_options: Any) -> Any:
    """The `@verifier` of the SDK, with or without arguments: it returns the function unchanged."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def install_fleet_stub(names: dict[str, Any]) -> None:
    """Make `import fleet` and every submodule importable, with `names` in each."""
    sys.meta_path.insert(0, _StubFinder(names))


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(
            {name: value for name, value in self._names.items() if not isinstance(value, ModuleType)}
        )


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        """An empty class for every other name, so that annotations work."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


NAMES: dict[str, Any] = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "normalized_contains": normalized_contains,
    "normalized_string_comparison": normalized_string_comparison,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "IgnoreConfig": IgnoreConfig,
    "DatabaseSnapshot": VerifierDatabase,
    "SnapshotDiff": SnapshotDiff,
    "Environment": VerifierEnvironment,
    "verifier": verifier,
    "json": json,
    "re": re,
    "string": string,
    **{
        name: getattr(typing, name)
        for name in ("Any", "Callable", "Dict", "List", "Optional", "Set", "Tuple", "Union")
    },
}
"""What a verifier can use without importing it."""
