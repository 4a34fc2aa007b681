"""Run by a Python that has the `swebench` package: `python -I package_program.py < request.json > answer.json`.

Imports nothing of Paddock. `swebench` and `swebench.harness` import Docker, Modal and the Hugging Face libraries when
they are loaded, so these two are replaced by empty packages, and what is only imported for them by stand-ins.
Parsers and grading are the package's own. Version 5 has parsers by name, version 4 also has parsers and commands by
repository.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

UNUSED = ("bs4", "chardet", "datasets", "docker", "dotenv", "ghapi", "git", "modal", "requests", "tenacity", "tqdm")
ENVIRONMENT = "testbed"
FOLDER = "/testbed"
NOT_RUN = (126, 127)
"""Exit codes of a shell that could not start the test command."""


class Unscorable(Exception):
    """What is asked cannot be answered for this row."""


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def prepare_imports() -> None:
    """Make the submodules of `swebench` importable without running its package files."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("swebench")
    (root,) = spec.submodule_search_locations
    for name, place in (("swebench", root), ("swebench.harness", f"{root}/harness")):
        package = types.ModuleType(name)
        package.__path__ = [place]
        sys.modules[name] = package
    for name in UNUSED:
        sys.modules[name] = StandIn(name)


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """How a row is scored: its test script, its parser, and whether only failures are printed."""
    parser = find_parser(row)
    script = row["script"] or repository_script(row)
    return {"script": script, "parser": parser, "evaluation": row["evaluation"] or repository_evaluation(row)}


def find_parser(row: dict[str, Any]) -> str:
    """The name of the parser, or "" for the one of the repository in version 4."""
    parsers = importlib.import_module("swebench.harness.log_parsers")
    if row["parser"]:
        if parser_function(row["parser"]) is None:
            raise Unscorable(f"swebench {version()} has no parser {row['parser']!r}")
        return str(row["parser"])
    if row["repository"] in getattr(parsers, "MAP_REPO_TO_PARSER", {}):
        return ""
    if hasattr(parsers, "MAP_REPO_TO_PARSER"):
        raise Unscorable(f"swebench {version()} has no parser for the repository {row['repository']!r}")
    raise Unscorable(f"the row names no log_parser, and swebench {version()} has none by repository")


def parser_function(name: str) -> Callable[..., dict[str, str]] | None:
    parsers = importlib.import_module("swebench.harness.log_parsers")
    registry = getattr(parsers, "PARSER_REGISTRY", None)
    if registry is not None:
        function: Callable[..., dict[str, str]] | None = registry.get(name)
        return function
    by_repository = {function.__name__: function for function in parsers.MAP_REPO_TO_PARSER.values()}
    return by_repository.get(name)


def repository_script(row: dict[str, Any]) -> str:
    constants = importlib.import_module("swebench.harness.constants")
    versions = getattr(constants, "MAP_REPO_VERSION_TO_SPECS", None)
    if versions is None:
        raise Unscorable(
            f"the row has no eval_script and no test_cmd, and swebench {version()} has none by repository"
        )
    specs = versions.get(row["repository"], {}).get(row["version"])
    if specs is None:
        raise Unscorable(f"swebench {version()} has no test command for {row['repository']} {row['version']}")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    instance = {**row["instance"], "repo": row["repository"], "version": row["version"]}
    lines = scripts.make_eval_script_list(
        instance, specs, ENVIRONMENT, FOLDER, instance["base_commit"], instance["test_patch"]
    )
    return "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines, ""])


def repository_evaluation(row: dict[str, Any]) -> str:
    constants = importlib.import_module("swebench.harness.constants")
    kind = constants.EvalType
    chosen = kind.FAIL_ONLY if row["repository"] in constants.FAIL_ONLY_REPOS else kind.PASS_AND_FAIL
    return str(chosen.value)


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Whether the log shows that the row is resolved. Raises Unscorable if the log does not say."""
    constants = importlib.import_module("swebench.harness.constants")
    grading = importlib.import_module("swebench.harness.grading")
    log = request["log"]
    check_log(log, constants)
    statuses, is_valid = read_statuses(request, log, grading)
    if not is_valid:
        exit_code = read_exit_code(log)
        if exit_code in NOT_RUN:
            raise Unscorable(f"the test command could not be started: exit code {exit_code}")
    gold = {"FAIL_TO_PASS": request["fail_to_pass"], "PASS_TO_PASS": request["pass_to_pass"]}
    kind = constants.EvalType(request["evaluation"] or repository_evaluation(request))
    report = grading.get_eval_tests_report(statuses, gold, eval_type=kind)
    status = grading.get_resolution_status(report)
    return {
        "resolved": is_valid and status == constants.ResolvedStatus.FULL.value,
        "valid": is_valid,
        "passed": {name: len(report[name]["success"]) if is_valid else 0 for name in gold},
        "failed": {name: report[name]["failure"] if is_valid else gold[name] for name in gold},
    }


def check_log(log: str, constants: Any) -> None:
    for marker in (constants.START_TEST_OUTPUT, constants.END_TEST_OUTPUT):
        if marker not in log:
            raise Unscorable("the log does not show that the tests were started and ended")
    for marker in (constants.APPLY_PATCH_FAIL, constants.RESET_FAILED):
        if marker in log:
            raise Unscorable(f"the log says {marker.lstrip('> ')!r}")


def read_statuses(request: dict[str, Any], log: str, grading: Any) -> tuple[dict[str, str], bool]:
    """The status of each test, and whether the log can be trusted, as `swebench` sees it."""
    fields = ("repository", "version", "parser", "instance_id")
    repository, row_version, parser, instance_id = (request[name] for name in fields)
    spec = types.SimpleNamespace(repo=repository, version=row_version, log_parser=parser, instance_id=instance_id)
    if parser and not hasattr(grading, "PARSER_REGISTRY"):
        # Version 4 would choose a parser by repository.
        constants = importlib.import_module("swebench.harness.constants")
        tests = log.split(constants.START_TEST_OUTPUT)[1].split(constants.END_TEST_OUTPUT)[0]
        parse = parser_function(parser)
        statuses = {} if parse is None else parse(tests, spec)
        return statuses, bool(statuses)
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        file.write(log)
        file.flush()
        statuses, is_valid = grading.get_logs_eval(spec, file.name)
    return statuses, is_valid and bool(statuses or request["evaluation"] == "fail_only")


def read_exit_code(log: str) -> int | None:
    _, marker, rest = log.rpartition(">>>>> Test Exit Code: ")
    digits = rest.split(maxsplit=1)[0] if marker and rest.split() else ""
    return int(digits) if digits.isdigit() else None


def version() -> str:
    return importlib.metadata.version("swebench")


def answer(action: Callable[..., dict[str, Any]], items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for item in items:
        try:
            yield action(item)
        except Unscorable as error:
            yield {"problem": str(error)}
        except ModuleNotFoundError:
            raise
        except Exception as error:
            yield {"problem": f"swebench {version()} failed: {type(error).__name__}: {error}"}


def main() -> None:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        prepare_imports()
        answers = list(answer({"describe": describe, "grade": grade}[request["action"]], request["items"]))
        reply = {"version": version(), "answers": answers}
    except ModuleNotFoundError as error:
        reply = {"missing": error.name or str(error)}
    json.dump(reply, output)


if __name__ == "__main__":
    main()
