"""Grading an episode: find the verifier's entry point, run it at the plane, read its answer.

A grade that is not known is None, with the reason; it is never 0. The source of a verifier is parsed here, and never
executed: it runs at the plane, beside the instance.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import hashlib
import io
import math
import pickle
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from paddock.fleet.client.errors import FleetError, VerifierInvalid
from paddock.retry import Backoff, Deadline

if TYPE_CHECKING:
    from paddock.fleet.client.instance_handle import InstanceHandle

JUDGE_RUNS = 3
"""How often a verifier is run in all when its judge fails."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What a verifier says about an episode. A reward of None is unknown."""

    reward: float | None = None
    failure_reason: str | None = None
    """None when the reward is to be trusted."""
    verifier_success: bool = False
    error: str | None = None
    stdout: str | None = None
    execution_id: str | None = None


@dataclass(frozen=True, slots=True)
class GradingRequest:
    """What to grade."""

    task: dict[str, Any]
    final_answer: str | None = None
    conversation: list[dict[str, Any]] | None = None
    partial: bool = False

    @property
    def source(self) -> str | None:
        source = self.task.get("verifier_code") or self.task.get("verifier_func")
        return source if isinstance(source, str) else None


async def grade(request: GradingRequest, handle: InstanceHandle | None, *, seconds: float) -> Grade:
    """Run the task's verifier at the plane. A failure is the reason of an unknown grade."""
    if not request.source:
        return Grade(failure_reason="no_verifier")
    if handle is None:
        return Grade(failure_reason="no_fleet_env")
    try:
        body = _request_body(request, request.source, handle.instance_id)
    except VerifierInvalid as error:
        return Grade(failure_reason="verifier_invalid", error=f"{error}{f' ({error.hint})' if error.hint else ''}")
    deadline = Deadline(seconds)
    pauses = Backoff(first_seconds=1.0, longest_seconds=10.0)
    for run in range(1, JUDGE_RUNS + 1):
        try:
            answer = await handle.plane.execute_verifier(body, seconds=deadline.seconds_left)
        except FleetError as error:
            gone = await handle.is_gone()
            return Grade(failure_reason="instance_expired" if gone else "verifier_exception", error=str(error))
        result = _read_answer(answer, partial=request.partial)
        pause = pauses.pause(run)
        if result.failure_reason != "judge_error" or run == JUDGE_RUNS or pause >= deadline.seconds_left:
            break
        await asyncio.sleep(pause)
    if result.failure_reason == "verifier_failed" and await handle.is_gone():
        return Grade(failure_reason="instance_expired", error=result.error, execution_id=result.execution_id)
    return result


def _request_body(request: GradingRequest, source: str, instance_id: str) -> dict[str, Any]:
    entry = find_entry_point(source, request.task.get("verifier_function"))
    arguments: dict[str, Any] = {}
    if request.final_answer is not None and entry.takes("final_answer"):
        arguments["final_answer"] = request.final_answer
    takes_conversation = entry.parameters is not None and "conversation" in entry.parameters
    if request.conversation is not None and takes_conversation:
        arguments["conversation"] = orjson.dumps(request.conversation, default=str).decode()
    key = str(request.task.get("task_key") or "unknown")
    return execute_body(key=key, source=source, entry=entry, instance_id=instance_id, arguments=arguments)


def _read_answer(answer: dict[str, Any], *, partial: bool) -> Grade:
    stdout = answer.get("stdout") if isinstance(answer.get("stdout"), str) else None
    execution_id = answer.get("execution_id")
    common: dict[str, Any] = {
        "stdout": stdout,
        "execution_id": execution_id if isinstance(execution_id, str) else None,
        "verifier_success": bool(answer["success"]),
    }
    if stdout and (message := judge_error(stdout)) is not None:
        return Grade(failure_reason="judge_error", error=message, **common)
    if not answer["success"]:
        return Grade(failure_reason="verifier_failed", error=_error_text(answer.get("error")), **common)
    value = answer.get("result")
    score = value.get("score") if isinstance(value, dict) else value
    if score is None:
        return Grade(failure_reason="verifier_no_result", error="the verifier returned no score", **common)
    if not isinstance(score, int | float) or not math.isfinite(score):
        message = f"the verifier returned {type(score).__name__}, which is no score"
        return Grade(failure_reason="verifier_bad_result", error=message, **common)
    reward = float(score)
    if partial and reward == 0.0 and stdout and (share := partial_reward(stdout)) is not None:
        reward = share
    return Grade(reward=reward, **common)


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return f"{error.get('type', 'error')}: {error.get('message', '')}"
    return str(error) if error else "the verifier failed without saying why"


# -- reading the output of a verifier -----------------------------------------------------------------

_BLOCK = r">>> {0}_ACCUMULATOR >>>\n(.+?)\n<<< {0}_ACCUMULATOR <<<"
_ERRORS = re.compile(_BLOCK.format("ERROR"), re.DOTALL)
_SUCCESSES = re.compile(_BLOCK.format("SUCCESS"), re.DOTALL)
_PASS_LINE = re.compile(r"^\s*PASS:\s*(.+)$", re.MULTILINE)
_APP = re.compile(r"^[ \t]*App[ \t]+(\S.*?)[ \t]*:[ \t]*([01])\b(.*)$", re.MULTILINE | re.IGNORECASE)
_UNCHANGED = re.compile(
    r"\bno[ -](?:unexpected|unintended|unrelated|file[ -]?system|database)[ -]\w+|\bno changes\b", re.IGNORECASE
)
"""A note that nothing was changed: "no unexpected changes", "No filesystem changes", "No-unexpected-envelopes"."""
_JUDGE = re.compile(r"^JUDGE ERROR:.*$", re.MULTILINE)


def partial_reward(stdout: str) -> float | None:
    """Partial credit from the output of a verifier: the share that passed, or None if the output does not say.

    A verifier of several applications prints one block for each: its notes between `<<< VERIFY_name <<<` and
    `>>> VERIFY_name >>>`, then `App name: 0` or `App name: 1`. An application whose notes only say that nothing was
    changed passes for an agent that does nothing, so it is not counted. A verifier of one application prints two
    accumulator lists instead: errors and successes.
    """
    apps = list(_APP.finditer(stdout))
    if apps:
        ends = [0, *(app.end() for app in apps)]
        sections = [stdout[start : app.start()] for start, app in zip(ends, apps, strict=False)]
        real = [app[2] == "1" for app, text in zip(apps, sections, strict=True) if not _is_unchanged(app, text)]
        return sum(real) / len(real) if real else None
    errors, successes = _read_accumulator(_ERRORS, stdout), _read_accumulator(_SUCCESSES, stdout)
    if errors is None and successes is None:
        return None
    passed = len(successes or ())
    total = len(errors or ()) + passed
    return passed / total if total else None


def judge_error(stdout: str) -> str | None:
    """The line that says that the verifier's judge failed, not the agent."""
    match = _JUDGE.search(stdout)
    return match.group(0) if match else None


def _is_unchanged(app: re.Match[str], section: str) -> bool:
    """Whether an application passed, and its notes only say that nothing was changed."""
    if app[2] != "1":
        return False
    block = re.search(
        rf"<<< VERIFY_{re.escape(app[1])} <<<(.*?)>>> VERIFY_{re.escape(app[1])} >>>", section, re.DOTALL
    )
    text = block[1] if block else section
    notes = [str(note) for listed in _SUCCESSES.finditer(text) for note in _parse_list(listed[1]) or ()]
    notes += [line[1] for line in _PASS_LINE.finditer(text)]
    if app[3].strip():
        notes.append(app[3])
    return bool(notes) and all(_UNCHANGED.search(note) for note in notes)


def _read_accumulator(block: re.Pattern[str], stdout: str) -> list[object] | None:
    match = block.search(stdout)
    return None if match is None else _parse_list(match[1])


def _parse_list(text: str) -> list[object] | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, list | tuple | dict | set) else None


# -- a verifier as it is sent to the plane ------------------------------------------------------------

ENTRY_NAMES = ("verify", "verifier", "validate", "evaluate", "grade")
ENTRY_PREFIXES = ("verify", "validate")
VERIFIER_SECONDS = 30
REGION = "us-west-1"
ZIP_DATE = (1980, 1, 1, 0, 0, 0)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The function to call, and its parameters; None when the source could not be parsed."""

    name: str
    parameters: frozenset[str] | None

    def takes(self, parameter: str) -> bool:
        return self.parameters is None or parameter in self.parameters or "**" in self.parameters


def find_entry_point(source: str, named: str | None = None) -> EntryPoint:
    """The verifier function: the one that is `named`, has the decorator, has a usual name, or is the only one.

    Raises VerifierInvalid when there is none, or when several functions qualify.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        if named:
            return EntryPoint(named, None)
        raise VerifierInvalid(f"the verifier cannot be parsed: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    name = named or _choose_function(functions)
    if name not in functions:
        names = ", ".join(functions) or "none"
        raise VerifierInvalid(f"the verifier has no function {name!r}", hint=f"there are: {names}")
    return EntryPoint(name, _parameters(functions[name]))


def _choose_function(functions: dict[str, Function]) -> str:
    if not functions:
        raise VerifierInvalid("the verifier defines no function")
    choices = (
        [name for name, node in functions.items() if _is_decorated(node)],
        [name for name in ENTRY_NAMES if name in functions][:1],
        list(functions),
        [name for name in functions if name.startswith(ENTRY_PREFIXES)],
    )
    for names in choices:
        if len(names) == 1:
            return names[0]
    raise VerifierInvalid(
        f"the verifier defines {', '.join(functions)}: which one is meant is not clear",
        hint="name it in the task's verifier_function",
    )


def _is_decorated(node: Function) -> bool:
    """Whether it carries `@verifier` or `@verifier(...)`."""
    targets = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(
        (isinstance(each, ast.Name) and each.id == "verifier")
        or (isinstance(each, ast.Attribute) and each.attr == "verifier")
        for each in targets
    )


def _parameters(node: Function) -> frozenset[str]:
    arguments = node.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return frozenset(names | ({"**"} if arguments.kwarg is not None else set()))


def execute_body(
    *,
    key: str,
    source: str,
    entry: EntryPoint,
    instance_id: str,
    arguments: dict[str, Any],
    seconds: int = VERIFIER_SECONDS,
) -> dict[str, Any]:
    """The body of a request that runs a verifier. `arguments` are keyword arguments of plain data."""
    bundle = _bundle(source)
    placeholder = {"env": instance_id}
    # Plain data pickles to the same stream that cloudpickle would write.
    packed = pickle.dumps({"args": (None, placeholder), "kwargs": arguments}, protocol=4)
    return {
        "key": key,
        "sha256": hashlib.sha256(bundle).hexdigest(),
        "args": base64.b64encode(packed).decode(),
        "args_array": [placeholder],
        "function_name": entry.name,
        "timeout": seconds,
        "region": REGION,
        "bundle": base64.b64encode(bundle).decode(),
    }


def _bundle(source: str) -> bytes:
    """The zip of a verifier: the same bytes for the same source, so that the plane recognizes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("requirements.txt", "fleet-python\n"), ("verifier.py", source)):
            archive.writestr(zipfile.ZipInfo(name, ZIP_DATE), text)
    return out.getvalue()
