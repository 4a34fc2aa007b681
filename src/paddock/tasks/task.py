"""A task: an instruction, the files and set-up it starts from, and a verifier. A value, checked when it is made.

Nothing here reads files or JSON (see `task_folder` and `task_json`), and nothing here runs anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, TaskError
from paddock.field_types import check_types
from paddock.limits import MEBIBYTE, RolloutTimeouts, SandboxLimits
from paddock.tasks.json_values import encoded, write_value
from paddock.tasks.settings import TaskImage, TaskNetwork, TaskSettings, TaskStep

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TEST_ENTRY = "test.sh"
SOLUTION_ENTRY = "solve.sh"
PLAIN_MODE = 0o644

LARGEST_INSTRUCTION = MEBIBYTE
LARGEST_FILE = 64 * MEBIBYTE
LINK_MODE = 0o120000
"""As in git: the content of such a file is the target of a symlink. Only in the build context of a Dockerfile."""
LONGEST_TARGET = 4095
LARGEST_TOTAL = 256 * MEBIBYTE
MOST_FILES = 10_000
LONGEST_ID = 200


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked to do, and how its work is scored.

    Raises TaskError when a part of it cannot be used.
    """

    instruction: str
    """What the agent is told to do."""
    id: str = ""
    """Empty: `task-` and the first eight digits of the hash."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By relative path. Without an image they are staged below the work folder; with one they are the context of its
    Dockerfile. Text is encoded as UTF-8."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permission bits of those `files` that are not 0o644."""
    setup: str = ""
    """Shell, run in the sandbox as the agent's user before the agent starts."""
    tests: Mapping[str, bytes] = field(default_factory=dict)
    """The verifier's files, seen only by the verifier. `test.sh` is the one that is run."""
    solution: Mapping[str, bytes] = field(default_factory=dict)
    """A reference solution, never staged for an agent. `solve.sh` is the one that is run."""
    sandbox: SandboxLimits = field(default_factory=SandboxLimits)
    """What the sandbox may use."""
    timeouts: RolloutTimeouts = field(default_factory=RolloutTimeouts)
    """A deadline for each stage."""
    image: TaskImage | None = None
    """The root of its sandboxes. None: the programs of the host."""
    network: TaskNetwork = field(default_factory=TaskNetwork)
    """What each phase may connect to."""
    settings: TaskSettings = field(default_factory=TaskSettings)
    """The further settings of `task.toml`."""
    steps: tuple[TaskStep, ...] = ()
    """The instructions that the agent gets one after the other. Empty: `instruction` alone."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything that JSON can hold. Not part of the hash."""
    source: str = field(default="", compare=False)
    """Where it was read from, for messages."""
    verifier: InitVar[str | bytes] = ""
    """Short for `tests={"test.sh": …}`."""

    def __post_init__(self, verifier: str | bytes) -> None:
        where = self.source or (f"task {self.id!r}" if self.id else "task")
        _check_instruction(self.instruction, where)
        _check_values(self, where)
        encoded(self.setup, f"{where}: the set-up shell")
        tests = dict(self.tests)
        if verifier:
            if TEST_ENTRY in tests:
                raise TaskError(f"{where}: both a verifier and tests/{TEST_ENTRY} are given", hint="keep one of them")
            tests[TEST_ENTRY] = encoded(verifier, f"{where}: the verifier")
        for name, files in (("files", self.files), ("tests", tests), ("solution", self.solution)):
            object.__setattr__(self, name, _checked_files(files, f"{where}: {name}"))
        is_context = self.image is not None and bool(self.image.dockerfile)
        object.__setattr__(self, "modes", _checked_modes(self.modes, self.files, where, allows_links=is_context))
        object.__setattr__(self, "steps", _checked_steps(self.steps, where))
        object.__setattr__(self, "metadata", dict(self.metadata))
        object.__setattr__(self, "id", _checked_id(self.id, where) if self.id else f"task-{self.hash[:8]}")

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def hash(self) -> str:
        """SHA-256 of all that an agent meets and all that scores it, in hexadecimal.

        Two tasks with the same hash are the same problem. The id, the metadata and the solution are
        left out: they change neither what an agent sees nor what its work is worth.
        """
        content = {
            "form": 1,
            "instruction": self.instruction,
            "files": {path: [_digest(data), self.mode(path)] for path, data in self.files.items()},
            "setup": self.setup,
            "tests": {path: _digest(data) for path, data in self.tests.items()},
            "sandbox": _numbers(asdict(self.sandbox)),
            "timeouts": _numbers(asdict(self.timeouts)),
            **self._hashed_settings(),
        }
        return _digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())

    def _hashed_settings(self) -> dict[str, Any]:
        """Those that differ from their defaults, so that a task without any has the hash it always had."""
        settings = replace(self.settings, solution_env={})
        steps = [{**write_value(replace(step, solution={})), **_digests(step)} for step in self.steps]
        values = {"image": write_value(self.image), "network": write_value(self.network), "steps": steps}
        return {name: value for name, value in {**values, "settings": write_value(settings)}.items() if value}

    @property
    def is_scored(self) -> bool:
        """Whether the task, or a step of it, has tests."""
        has_own_image = self.settings.verifier.image is not None
        return has_own_image or TEST_ENTRY in self.tests or any(TEST_ENTRY in step.tests for step in self.steps)

    @property
    def has_solution(self) -> bool:
        """Whether the task, or a step of it, has a solution that can be run."""
        return SOLUTION_ENTRY in self.solution or any(SOLUTION_ENTRY in step.solution for step in self.steps)

    def mode(self, path: str) -> int:
        """The permission bits that one of `files` is staged with."""
        return self.modes.get(path, PLAIN_MODE)

    @classmethod
    def from_folder(cls, path: str | Path) -> Task:
        """Read a task folder (see `paddock.tasks.task_folder` for its layout)."""
        from paddock.tasks.task_folder import read_task_folder

        return read_task_folder(path)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str = "") -> Task:
        """Read the JSON form (see `paddock.tasks.task_json` for its keys)."""
        from paddock.tasks.task_json import task_from_json

        return task_from_json(data, source=source)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, from which `from_json` makes an equal task."""
        from paddock.tasks.task_json import task_to_json

        return task_to_json(self)


def check_path(path: str, where: str) -> None:
    """Raises TaskError unless `path` is relative, plain, and stays below the folder it is put in."""
    if not isinstance(path, str) or not path or any(ord(character) < 32 for character in path):
        raise TaskError(f"{where}: {path!r} is not a file path", hint="use a plain relative path such as src/main.py")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise TaskError(f"{where}: the name of {path!r} is not UTF-8", hint="rename the file") from None
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise TaskError(
            f"{where}: {path!r} does not stay below its folder or is not plain",
            hint="use a relative path without '..', '.' or doubled slashes",
        )
    if len(encoded) > 1024 or any(len(part.encode()) > 255 for part in pure.parts):
        raise TaskError(f"{where}: the path {path[:60]!r}… is too long", hint="keep each name below 256 bytes")


def _checked_files(files: Mapping[str, bytes | str], where: str) -> dict[str, bytes]:
    if len(files) > MOST_FILES:
        raise TaskError(
            f"{where}: {len(files)} files", hint=f"at most {MOST_FILES} are staged; pack them in an archive"
        )
    checked: dict[str, bytes] = {}
    total = 0
    for path in sorted(files, key=str):
        check_path(path, where)
        data = encoded(files[path], f"{where}: {path}")
        total += len(data)
        check_size(path, len(data), total, where)
        checked[path] = data
    for path in checked:
        for folder in PurePosixPath(path).parents:
            if str(folder) in checked:
                raise TaskError(
                    f"{where}: {str(folder)!r} is a file and also a folder with {path!r}", hint="rename one"
                )
    return checked


def check_size(path: str, size: int, total: int, where: str) -> None:
    """Raises TaskError when a file, or all files so far, are too large to be kept in memory and staged."""
    if size > LARGEST_FILE:
        raise TaskError(
            f"{where}: {path} has {size} bytes, over {LARGEST_FILE // MEBIBYTE} MiB",
            hint="make large files in the set-up shell",
        )
    if total > LARGEST_TOTAL:
        raise TaskError(
            f"{where}: the files have more than {LARGEST_TOTAL // MEBIBYTE} MiB together",
            hint="make large files in the set-up shell",
        )


def _checked_modes(
    modes: Mapping[str, int], files: Mapping[str, bytes], where: str, *, allows_links: bool = False
) -> dict[str, int]:
    for path, mode in modes.items():
        if path not in files:
            raise TaskError(f"{where}: modes names {path!r}, which is not among files", hint="add the file")
        if mode == LINK_MODE and allows_links:
            if not 0 < len(files[path]) <= LONGEST_TARGET or b"\0" in files[path]:
                raise TaskError(f"{where}: the symlink {path!r} leads nowhere", hint="give the path that it leads to")
            continue
        if not isinstance(mode, int) or not 0 <= mode <= 0o777:
            raise TaskError(f"{where}: the mode of {path!r} is {mode!r}", hint="give permission bits such as 0o755")
    return {path: mode for path, mode in sorted(modes.items()) if mode != PLAIN_MODE}


def _checked_steps(steps: tuple[TaskStep, ...], where: str) -> tuple[TaskStep, ...]:
    names = [step.name for step in steps]
    for name in names:
        if names.count(name) > 1:
            raise TaskError(f"{where}: two steps have the name {name!r}", hint="give each step its own name")
    return tuple(_checked_step(step, f"{where}: step {step.name}") for step in steps)


def _checked_step(step: TaskStep, where: str) -> TaskStep:
    files = _checked_files(step.files, f"{where}: files")
    return replace(
        step,
        files=files,
        modes=_checked_modes(step.modes, files, where),
        tests=_checked_files(step.tests, f"{where}: tests"),
        solution=_checked_files(step.solution, f"{where}: solution"),
    )


def _check_values(task: Task, where: str) -> None:
    """An image or a network is written as a text elsewhere, so this is a likely mistake."""
    try:
        check_types(task, "sandbox", "timeouts", "image", "network", "settings")
    except ConfigError as error:
        raise TaskError(f"{where}: {error.message}", hint=error.hint) from None


def _check_instruction(instruction: str, where: str) -> None:
    if not isinstance(instruction, str) or not instruction.strip():
        raise TaskError(f"{where}: the instruction is missing or empty", hint="say what the agent has to do")
    if len(encoded(instruction, f"{where}: the instruction")) > LARGEST_INSTRUCTION:
        raise TaskError(f"{where}: the instruction is over 1 MiB", hint="put long material into a file")


def _checked_id(id: str, where: str) -> str:
    if not isinstance(id, str) or id != id.strip() or len(id) > LONGEST_ID or not id.isprintable():
        raise TaskError(
            f"{where}: {id!r} cannot be an id",
            hint=f"use up to {LONGEST_ID} printable characters without spaces around them",
        )
    return id


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digests(step: TaskStep) -> dict[str, dict[str, str]]:
    return {name: {path: _digest(data) for path, data in getattr(step, name).items()} for name in ("files", "tests")}


def _numbers(values: dict[str, Any]) -> dict[str, float | None]:
    """600 and 600.0 are the same limit, so they have the same hash."""
    return {name: None if value is None else float(value) for name, value in values.items()}
