"""Tasks from rows like those of SWE-bench, in a .jsonl, .json or .parquet file.

| column | what it holds |
|---|---|
| `instance_id`, `problem_statement` | the id and the instruction |
| `repo`, `version`, `base_commit` | what the parser and the test command are chosen by |
| `patch`, `test_patch` | the solution, and the tests that score it |
| `FAIL_TO_PASS`, `PASS_TO_PASS` | names of tests, as a list or as JSON text |
| `image`, `docker_image` or `image_name` | the image; otherwise the one that SWE-bench publishes for the row |
| `eval_script`, `log_parser`, `eval_type` | of swebench 5: how the row is tested and scored |
| `test_cmd` | a test command for rows without `eval_script`; also in `install_config` |
| `workdir` | where the repository is in the image; otherwise `/testbed` |
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import TaskError
from paddock.limits import MEBIBYTE, RolloutTimeouts, SandboxLimits
from paddock.tasks.json_values import parse_json
from paddock.tasks.settings import EnvironmentSettings, LogGrader, TaskImage, TaskSettings, VerifierSettings
from paddock.tasks.swebench.package import RowDescription, describe_rows
from paddock.tasks.swebench.scripts import (
    EVAL_SCRIPT,
    FOLDER,
    GOLD_PATCH,
    TEST_PATCH,
    TEST_SCRIPT,
    command_script,
    record_exit_code,
    solution_script,
)
from paddock.tasks.task import SOLUTION_ENTRY, TEST_ENTRY, Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

IMAGE_COLUMNS = ("image", "docker_image", "image_name")
PUBLISHED_IMAGE = "swebench/sweb.eval.{machine}.{instance}:latest"
"""The name under which SWE-bench publishes the image of a row. `__` is not allowed in it."""
REQUIRED = ("instance_id", "problem_statement", "repo")
KEPT_METADATA = ("repo", "version", "base_commit", "created_at", "difficulty")
VERIFIER_SECONDS = 1800.0
LOG_BYTES = 32 * MEBIBYTE
ROW_HINT = "the columns are listed in docs/tasks.md"
PARSER_HINT = (
    "give the row log_parser and eval_script or test_cmd, or use the swebench version that the set is made for"
)


@dataclass(frozen=True, slots=True)
class SwebenchRow:
    """One row, checked."""

    instance_id: str
    problem_statement: str
    repo: str
    version: str
    base_commit: str
    patch: str
    test_patch: str
    image: str
    workdir: str
    eval_script: str
    test_command: str | tuple[str, ...]
    log_parser: str
    eval_type: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    problem: str = ""
    """Why it cannot be scored."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> str:
        """The test script that the row itself gives; empty: that of the package for its repository."""
        if self.eval_script:
            return self.eval_script
        if not self.test_command:
            return ""
        return command_script(
            self.test_command, folder=self.workdir, commit=self.base_commit, test_patch=self.test_patch
        )


def read_rows(file: Path) -> list[Task]:
    """The tasks of a file of rows. A row that cannot be scored is a task that is refused when it is run.

    Raises TaskError for a file or row that cannot be read, and where the `swebench` package is missing.
    """
    rows = [_read_row(data, place) for place, data in _read_file(file)]
    descriptions = describe_rows([_description_request(row) for row in rows])
    return [_task(row, description, str(file)) for row, description in zip(rows, descriptions, strict=True)]


def _description_request(row: SwebenchRow) -> dict[str, Any]:
    instance = {
        "instance_id": row.instance_id,
        "base_commit": row.base_commit,
        "test_patch": row.test_patch,
    }
    return {
        "repository": row.repo,
        "version": row.version,
        "parser": row.log_parser,
        "evaluation": row.eval_type,
        "script": row.script,
        "instance": instance,
    }


def _task(row: SwebenchRow, description: RowDescription, source: str) -> Task:
    problem = row.problem or description.problem
    grader = LogGrader(
        repository=row.repo,
        version=row.version,
        instance=row.instance_id,
        parser=description.parser,
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        evaluation=description.evaluation,
        problem=problem,
        hint=PARSER_HINT if problem else "",
    )
    tests = {TEST_ENTRY: TEST_SCRIPT.encode(), EVAL_SCRIPT: record_exit_code(description.script).encode()}
    if row.test_patch:
        tests[TEST_PATCH] = row.test_patch.encode()
    solution = {SOLUTION_ENTRY: solution_script(row.workdir).encode(), GOLD_PATCH: row.patch.encode()}
    return Task(
        instruction=row.problem_statement,
        id=row.instance_id,
        tests=tests,
        solution=solution if row.patch else {},
        # The whole log is needed outside.
        sandbox=SandboxLimits(output_bytes=LOG_BYTES),
        timeouts=RolloutTimeouts(verifier=VERIFIER_SECONDS),
        image=TaskImage(name=row.image),
        settings=TaskSettings(
            environment=EnvironmentSettings(workdir=row.workdir),
            verifier=VerifierSettings(mode="sealed", grader=grader),
        ),
        metadata=row.metadata,
        source=source,
    )


# -- reading ----------------------------------------------------------------------------------------------


def _read_file(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows, each with its place."""
    try:
        if file.suffix == ".parquet":
            rows = _read_parquet(file)
        elif file.suffix == ".jsonl":
            lines = enumerate(file.read_bytes().splitlines(), start=1)
            rows = [
                (f"{file}:{number}", parse_json(line, f"{file}:{number}")) for number, line in lines if line.strip()
            ]
        else:
            data = parse_json(file.read_bytes(), str(file))
            items = data if isinstance(data, list) else [data]
            rows = [(f"{file}[{number}]", item) for number, item in enumerate(items)]
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror or error}", hint="name a readable file") from error
    if not rows:
        raise TaskError(f"{file} holds no row", hint=ROW_HINT)
    return rows


def _read_parquet(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    try:
        rows = pyarrow.parquet.read_table(str(file)).to_pylist()
    except ArrowException as error:
        raise TaskError(f"{file} is not a Parquet file: {error}", hint="name a .jsonl or .parquet file") from error
    return [(f"{file}: row {number}", row) for number, row in enumerate(rows)]


def _read_row(data: Mapping[str, Any], place: str) -> SwebenchRow:
    if not isinstance(data, dict):
        raise TaskError(f"{place} is not an object", hint=ROW_HINT)
    for name in REQUIRED:
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise TaskError(f"{place}: {name} is missing or no text", hint=ROW_HINT)
    config = data.get("install_config")
    config = config if isinstance(config, dict) else {}
    lists = {name: _names(data.get(name), f"{place}: {name}") for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    has_tests = any(lists.values())
    return SwebenchRow(
        instance_id=data["instance_id"],
        problem_statement=data["problem_statement"],
        repo=data["repo"],
        version=str(data.get("version") or ""),
        base_commit=_text(data, "base_commit", place),
        patch=_text(data, "patch", place),
        test_patch=_text(data, "test_patch", place),
        image=_image(data, place),
        workdir=_text(data, "workdir", place) or FOLDER,
        eval_script=_text(data, "eval_script", place),
        test_command=_command(data.get("test_cmd") or config.get("test_cmd"), f"{place}: test_cmd"),
        log_parser=_text(data, "log_parser", place) or _text(config, "log_parser", place),
        eval_type=_text(data, "eval_type", place),
        fail_to_pass=lists["FAIL_TO_PASS"],
        pass_to_pass=lists["PASS_TO_PASS"],
        problem="" if has_tests else "the row has neither FAIL_TO_PASS nor PASS_TO_PASS",
        metadata={name: data[name] for name in KEPT_METADATA if isinstance(data.get(name), str)},
    )


def _image(data: Mapping[str, Any], place: str) -> str:
    for column in IMAGE_COLUMNS:
        if name := _text(data, column, place):
            return name
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
    return PUBLISHED_IMAGE.format(machine=machine, instance=data["instance_id"].lower().replace("__", "_1776_"))


def _text(data: Mapping[str, Any], name: str, place: str) -> str:
    value = data.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TaskError(f"{place}: {name} is {value!r:.60}, not text", hint=ROW_HINT)
    return value


def _command(value: Any, place: str) -> str | tuple[str, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise TaskError(f"{place} is neither text nor a list of texts", hint=ROW_HINT)
    return tuple(value)


def _names(value: Any, place: str) -> tuple[str, ...]:
    names = parse_json(value.encode(), place) if isinstance(value, str) and value else value
    if not names:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TaskError(f"{place} is not a list of test names", hint=ROW_HINT)
    return tuple(names)
