"""Common faults of tasks, by name: those that its files show, and those that the output of its programs shows.

Runs nothing. `paddock check` asks it why an image could not be built, or why a solution does not score 1.0. The text
that is searched is that of foreign programs (bash, apt, pip, curl), which have no other way to say what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.tasks.task import SOLUTION_ENTRY, TEST_ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paddock.tasks.task import Task

NO_TESTS = "no-tests"
NO_SOLUTION = "no-solution"
CRLF = "crlf"
ALWAYS_FULL_REWARD = "always-1.0"
SOLUTION_BELOW_FULL_REWARD = "solution-below-1.0"
IMAGE_UNAVAILABLE = "image-not-available"
UNSUPPORTED = "not-supported"
UNKNOWN_KEY = "unknown-key"
BUILD_FAILS = "build-fails"
HOST_DOES_NOT_ANSWER = "host-does-not-answer"
NO_NETWORK_REASON = "this phase has no network"
"""As the egress proxy says it. Without any proxy, programs only report that a name cannot be resolved."""
NO_REWARD = "no-reward"
CONSTANT_REWARD = re.compile(
    r"^\s*(?:echo|printf)\s+['\"]?1(?:\.0*)?(?:\\n)?['\"]?\s*>+\s*\S*reward\.txt", re.MULTILINE
)
CONDITION = re.compile(
    r"\b(?:if|case|while|until|exit|pytest|python3?|node|return|trap)\b|&&|\|\||^\s*set\s[^#\n]*(?:-\w*e|errexit)",
    re.MULTILINE,
)
ERREXIT_SHEBANG = re.compile(rb"#!.*\s-\w*e")


@dataclass(frozen=True, slots=True)
class TaskFault:
    """What is wrong with a task."""

    name: str
    """A short name from the table in docs/tasks.md."""
    detail: str
    hint: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


# -- the files --------------------------------------------------------------------------------------------


def find_file_faults(task: Task) -> list[TaskFault]:
    """What the files of a task show before anything is run."""
    folders = [("tests", task.tests, TEST_ENTRY), ("solution", task.solution, SOLUTION_ENTRY)]
    for step in task.steps:
        place = f"steps/{step.name}"
        folders += [(f"{place}/tests", step.tests, TEST_ENTRY), (f"{place}/solution", step.solution, SOLUTION_ENTRY)]
    faults = [fault for place, files, _ in folders for fault in _line_end_faults(place, files)]
    faults += _missing_tests(task)
    # The test of a task with steps is only run for steps without one of their own.
    unused = ["tests"] if task.steps and not find_untested_steps(task) else []
    for place, files, entry in folders:
        if place not in unused and entry == TEST_ENTRY and _always_rewards(files.get(TEST_ENTRY, b"")):
            scored = f", and it scores {_list_steps(task)}" if task.steps and place == "tests" else ""
            detail = f"{place}/{TEST_ENTRY} writes the reward 1 without any condition{scored}"
            faults.append(TaskFault(ALWAYS_FULL_REWARD, detail, "write 1 only if the tests pass"))
    return faults


def find_untested_steps(task: Task) -> list[str]:
    """The names of steps without a test of their own. The task's test scores them, if it has one."""
    return [step.name for step in task.steps if TEST_ENTRY not in step.tests]


def _missing_tests(task: Task) -> Iterator[TaskFault]:
    if TEST_ENTRY in task.tests:
        return
    hint = f"add {{}}/{TEST_ENTRY}, which writes /logs/verifier/reward.txt"
    if not task.steps:
        yield TaskFault(NO_TESTS, f"there is no tests/{TEST_ENTRY}", hint.format("tests"))
    for name in find_untested_steps(task):
        place = f"steps/{name}/tests"
        yield TaskFault(NO_TESTS, f"step {name} has no {place}/{TEST_ENTRY}", hint.format(place))


def _list_steps(task: Task) -> str:
    names = find_untested_steps(task)
    return f"the step{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _line_end_faults(place: str, files: Mapping[str, bytes]) -> Iterator[TaskFault]:
    for name, data in files.items():
        is_script = name.endswith(".sh") or data.startswith(b"#!")
        if is_script and b"\r\n" in data:
            detail = f"{place}/{name} has Windows line ends, which a shell takes as part of the words"
            yield TaskFault(CRLF, detail, f"run: sed -i 's/\\r$//' {place}/{name}")


def find_line_end_fault(context: Mapping[str, bytes], message: str) -> TaskFault | None:
    """The script of a build context whose Windows line ends explain why the build did not find a program.

    Such files are not a fault by themselves: a task may be about them.
    """
    if "not found" not in message and "No such file" not in message:
        return None
    named = {path: data for path, data in context.items() if path.rpartition("/")[2] in message}
    return next(_line_end_faults("environment", named), None)


def _always_rewards(script: bytes) -> bool:
    lines = script.decode(errors="replace").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    is_conditional = CONDITION.search(text) is not None or ERREXIT_SHEBANG.match(script) is not None
    return CONSTANT_REWARD.search(text) is not None and not is_conditional


# -- the output of programs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputPattern:
    """Text that a program prints for one fault. `{0}` in detail and hint is the first group that matched."""

    name: str
    pattern: re.Pattern[str]
    detail: str
    hint: str

    def find(self, output: str) -> TaskFault | None:
        match = self.pattern.search(output)
        if match is None:
            return None
        words = next((group for group in match.groups() if group), "").strip()
        return TaskFault(self.name, self.detail.format(words), self.hint.format(words))


def _pattern(name: str, pattern: str, detail: str, hint: str) -> OutputPattern:
    return OutputPattern(name, re.compile(pattern, re.MULTILINE), detail, hint)


IN_DOCKERFILE = "install {0} in environment/Dockerfile"
HOST_HINT = "allow {0} in network_mode and allowed_hosts, or bring what it serves with the task"
PATTERNS = (
    _pattern(
        CRLF,
        r"(\$'\\r'|\S*\\r|\S+\^M)['’]?: (?:command not found|bad interpreter|No such file or directory)",
        "a script has Windows line ends",
        "run sed -i 's/\\r$//' on it",
    ),
    _pattern(
        "refused-host",
        r"([\w.:-]+) port \d+ was refused: (?!this phase)",
        "the network policy refuses {0}",
        HOST_HINT,
    ),
    _pattern(
        "refused-host",
        r"([\w.-]+\.\w+)(?: resolves to \S+, [\w -]+, which)? is not in allowed_hosts",
        "the network policy refuses {0}",
        HOST_HINT,
    ),
    _pattern(
        "refused-host",
        r"(this phase has no network)",
        "a program wants a network, and {0}",
        "set network_mode for this phase in task.toml, or install what is missing in environment/Dockerfile",
    ),
    _pattern(
        HOST_DOES_NOT_ANSWER,
        r"(?:Could not resolve host: |Could not resolve '|Temporary failure resolving '|getaddrinfo \w+ "
        r"|unable to resolve host address [‘'\"])"
        r"([\w.-]+)"
        r"|([\w.-]+\.\w+) (?:does not resolve|has no address|did not resolve in time)"
        r"|Failed to connect to ([\w.-]+)|([\w.-]+) port \d+ (?:did not answer|cannot be reached)",
        "the host {0} does not answer",
        "check that {0} still exists and that this machine reaches it, or bring what it serves with the task",
    ),
    _pattern(
        HOST_DOES_NOT_ANSWER,
        r"Temporary failure in name resolution|Name or service not known",
        "the name of a host cannot be resolved",
        "check that the host still exists and that this machine reaches it, or bring what it serves with the task",
    ),
    _pattern(
        "apt-version-gone",
        r"E: Version '([^']+' for '[^']+)' was not found",
        "apt has no version '{0}' any more",
        "remove the version, or pin one that the mirror has",
    ),
    _pattern(
        "apt-package-unknown",
        r"E: Unable to locate package (\S+)|E: Package '([^']+)' has no installation candidate",
        "apt knows no package {0}",
        "run apt-get update in the same RUN line, and check the name for this release",
    ),
    _pattern(
        "pip-version-gone",
        r"No matching distribution found for (\S+)|Because there is no version of (\S+)"
        r"|Because (\S+) was not found in the package registry",
        "the package index has no {0} for this Python",
        "pin a version that exists",
    ),
    _pattern(
        "pip-externally-managed",
        r"(externally-managed-environment)",
        "pip refuses to install into the Python of the distribution",
        "use a virtual environment, or pip install --break-system-packages",
    ),
    _pattern(
        "no-work-folder",
        r"(No working directory set)",
        "the image has no WORKDIR, and the tests need one",
        "add WORKDIR /app to environment/Dockerfile",
    ),
    _pattern(
        "set-user-id",
        r"\"?no new privileges\"? flag|sudo: effective uid is not 0",
        "a program such as sudo wants to become root, and programs in a sandbox cannot change their user that way",
        "run it as root: agents and tests are root where the image has no USER, and the solution can use su USER",
    ),
    _pattern(
        "missing-service-manager",
        r"System has not been booted with systemd|(systemctl): (?:command )?not found",
        "there is no systemd in a sandbox, as in any container",
        "start the service with its own program, or with service NAME start",
    ),
    _pattern(
        "missing-module",
        r"No module named '?([\w.]+)",
        "Python has no module {0} in the image",
        IN_DOCKERFILE,
    ),
    _pattern(
        "missing-program",
        r"(?:line \d+: |\d+: |^|: )([\w.+-]+): (?:command )?not found"
        r"|(?:env|exec): [‘'\"]?([\w./+-]+)[’'\"]?: (?:No such file|not found)"
        r"|No such file or directory: '([\w.+-]+)'|/(bash|sh|python3?|node): No such file",
        "the image has no {0}",
        IN_DOCKERFILE,
    ),
    _pattern(
        # A program that the first line of a script names is reported as if the script were missing.
        "missing-program",
        r"/(?:tests/test|solution/solve)\.sh: (?:not found|cannot execute: required file)",
        "the image has no such program as the first line of test.sh or solve.sh names",
        "install that program, such as bash, in environment/Dockerfile, or correct the line and its end",
    ),
    _pattern(
        "not-executable",
        r"(?:line \d+|\d+|bash|sh|exec|env): (\S+\.\w+|/\S+): Permission denied",
        "{0} cannot be run: it has no execute bit, or belongs to another user",
        "chmod +x {0}, or COPY --chmod=755",
    ),
    _pattern(
        "disk-full",
        r"No space left on device|File size limit exceeded|File too large|used (?:more|too much) disk",
        "the disk of the sandbox is full",
        "raise storage_mb",
    ),
    _pattern(
        "memory-full",
        r"used (?:more|too much) memory",
        "the programs need more memory than the sandbox has",
        "raise memory_mb",
    ),
    _pattern(
        "unknown-user",
        r"user (\S+): there is no such user",
        "the image has no user {0}",
        "create it in environment/Dockerfile with useradd, or correct user in task.toml",
    ),
    _pattern(
        "one-user-id",
        r"cannot run as (\S+): this machine gives a sandbox only one id",
        "this machine cannot run commands as {0}",
        "run it on a machine with a range of user ids: paddock doctor says what is missing",
    ),
    _pattern(
        "build-times-out",
        r"the build did not end within ([\d.]+ s)",
        "the build did not end within {0}",
        "raise environment.build_timeout_sec",
    ),
    _pattern(
        "not-healthy",
        r"the health check failed (\d+) times",
        "the health check of the task failed {0} times",
        "look at environment.healthcheck and at the service that it asks",
    ),
    _pattern(
        "tests-time-out",
        r"the verifier did not finish within ([\d.]+ s)",
        "the tests did not end within {0}",
        "raise [verifier] timeout_sec, or make the tests faster",
    ),
    _pattern(
        HOST_DOES_NOT_ANSWER,
        r"Network is unreachable",
        "a program finds no route: it does not use the proxy",
        "connect through the proxy that http_proxy and https_proxy name: there is no other way out of a sandbox",
    ),
    _pattern(
        "solution-times-out",
        r"the solution did not succeed: it did not end in time",
        "the solution did not end in time",
        "raise [agent] timeout_sec, or make the solution faster",
    ),
    _pattern(
        "solution-fails",
        r"the solution did not succeed|the solution ended with exit code",
        "the solution itself fails",
        "see the end of its output",
    ),
)


def diagnose_output(*outputs: str) -> TaskFault | None:
    """The first fault that the output of a program shows. Earlier patterns are causes of later ones."""
    text = "\n".join(outputs)
    return next((fault for pattern in PATTERNS if (fault := pattern.find(text)) is not None), None)
