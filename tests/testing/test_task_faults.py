"""Faults of tasks that their files, and the output of programs, show."""

from __future__ import annotations

import pytest

from paddock.tasks.settings import TaskStep
from paddock.tasks.task import Task
from paddock.testing.task_faults import diagnose_output, find_file_faults, find_line_end_fault

TESTS = "#!/bin/bash\nif grep -q yes /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"tests": {"test.sh": TESTS}}, None),
        ({}, "no-tests"),
        ({"tests": {"test.sh": TESTS.replace("\n", "\r\n")}}, "crlf"),
        ({"tests": {"test.sh": TESTS}, "solution": {"solve.sh": "echo yes > answer\r\n"}}, "crlf"),
        ({"tests": {"test.sh": TESTS, "data.csv": "a,b\r\n"}}, None),
        ({"tests": {"test.sh": "mkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"}}, "always-1.0"),
        ({"tests": {"test.sh": "# only if it works\necho '1.0' > /logs/verifier/reward.txt\n"}}, "always-1.0"),
        ({"tests": {"test.sh": "set -e\npytest\necho 1 > /logs/verifier/reward.txt\n"}}, None),
        ({"tests": {"test.sh": "set -eu\ncmp /app/a /tests/a\necho 1 > /logs/verifier/reward.txt\n"}}, None),
        ({"tests": {"test.sh": "#!/bin/bash -e\ncmp /app/a /tests/a\necho 1 > /logs/verifier/reward.txt\n"}}, None),
    ],
)
def test_the_files_of_a_task_show_its_faults(files: dict[str, dict[str, bytes]], fault: str | None) -> None:
    names = [one.name for one in find_file_faults(Task("Do it.", **files))]  # type: ignore[arg-type]
    assert names == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("output", "fault", "words"),
    [
        ("/tests/test.sh: line 4: pytest: command not found", "missing-program", "no pytest"),
        ("/bin/sh: 1: pip: not found", "missing-program", "no pip"),
        ("/usr/bin/env: ‘python3’: No such file or directory", "missing-program", "no python3"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'git'", "missing-program", "no git"),
        ("sh: /tests/test.sh: not found", "missing-program", "first line"),
        ("bash: /solution/solve.sh: cannot execute: required file not found", "missing-program", "first line"),
        ("/usr/bin/python3: No module named pytest", "missing-module", "module pytest"),
        ("ModuleNotFoundError: No module named 'yaml'", "missing-module", "module yaml"),
        ("E: Version '7.1-2' for 'curl' was not found", "apt-version-gone", "'7.1-2' for 'curl'"),
        ("E: Unable to locate package libfoo", "apt-package-unknown", "libfoo"),
        ("ERROR: No matching distribution found for numpy==1.0", "pip-version-gone", "numpy==1.0"),
        ("curl: (6) Could not resolve host: files.example.com", "host-does-not-answer", "files.example.com"),
        ("502 files.example.com does not resolve: Name or service", "host-does-not-answer", "files.example.com"),
        ("403  files.example.com is not in allowed_hosts", "refused-host", "files.example.com"),
        (
            "a.example resolves to 10.1.2.3, a private address, which is not in allowed_hosts",
            "refused-host",
            "a.example",
        ),
        ("CONNECT refused: this phase has no network", "refused-host", "no network"),
        ("/tests/test.sh: line 2: $'\\r': command not found", "crlf", "Windows"),
        ("bash: /app/run.sh: Permission denied", "not-executable", "/app/run.sh"),
        ("files.example.com port 443 cannot be reached: proxy: 502", "host-does-not-answer", "files.example.com"),
        ("files.example.com port 443 was refused: it is link-local", "refused-host", "files.example.com"),
        ("10.0.0.1 port 443 was refused: this phase has no network", "refused-host", "no network"),
        ("Err:1 Temporary failure resolving 'deb.example.org'", "host-does-not-answer", "deb.example.org"),
        ('sudo: The "no new privileges" flag is set', "set-user-id", "sudo"),
        ("solve.sh: line 3: systemctl: command not found", "missing-service-manager", "systemd"),
        ("solve.sh: line 3: 4 File size limit exceeded dd", "disk-full", "disk"),
        ("the verifier used more memory than allowed", "memory-full", "memory"),
        ("user ghost: there is no such user or group in the image", "unknown-user", "ghost"),
        ("the build did not end within 600 s", "build-times-out", "600 s"),
        ("the health check failed 3 times: no", "not-healthy", "3 times"),
        ("the verifier did not finish within 5 s", "tests-time-out", "5 s"),
        ("the solution did not succeed: it did not end in time: ", "solution-times-out", "in time"),
        ("the solution did not succeed: exit code 2: ", "solution-fails", "fails"),
        ("Error: No working directory set. Please set a WORKDIR in your Dockerfile.", "no-work-folder", "WORKDIR"),
        ("bash: connect: Network is unreachable", "host-does-not-answer", "proxy"),
        ("error: externally-managed-environment", "pip-externally-managed", "distribution"),
    ],
)
def test_the_output_of_programs_shows_a_fault(output: str, fault: str, words: str) -> None:
    visible = diagnose_output("some lines before\n" + output + "\nand after")
    assert visible is not None
    assert visible.name == fault
    assert words in visible.detail


@pytest.mark.parametrize(
    "output",
    [
        "",
        "2 failed, 3 passed",
        "cat: /home/bob/key: Permission denied",
        "AssertionError: file not found in the archive",
    ],
)
def test_ordinary_output_shows_no_fault(output: str) -> None:
    assert diagnose_output(output) is None


def test_a_refused_host_comes_before_the_program_that_it_did_not_bring() -> None:
    output = "curl: 403 get.example.com is not in allowed_hosts\ntest.sh: line 3: uvx: command not found"
    fault = diagnose_output(output)
    assert fault is not None
    assert fault.name == "refused-host"


def test_line_ends_explain_a_script_that_a_build_does_not_find() -> None:
    context = {"run.sh": b"#!/bin/bash\r\ntrue\r\n", "other.sh": b"true\r\n", "plain.sh": b"true\n"}
    fault = find_line_end_fault(
        context, "RUN ./run.sh: it ended with exit code 127\n    /bin/sh: 1: ./run.sh: not found"
    )
    assert fault is not None
    assert "environment/run.sh" in fault.detail
    assert find_line_end_fault(context, "RUN ./run.sh: it ended with exit code 1") is None
    assert find_line_end_fault(context, "RUN ./plain.sh: not found") is None


def step(name: str, **tests: str) -> TaskStep:
    return TaskStep(name, "do it", tests={f"{entry}.sh": text.encode() for entry, text in tests.items()})


ALWAYS = "echo 1 > /logs/verifier/reward.txt"


def test_a_step_without_a_test_is_named() -> None:
    task = Task("do it", steps=(step("one", test="exit 0"), step("two")))
    assert [str(fault) for fault in find_file_faults(task)] == ["no-tests: step two has no steps/two/tests/test.sh"]


def test_the_test_of_a_task_is_a_fault_only_for_steps_that_it_scores() -> None:
    own = step("one", test="pytest")
    assert find_file_faults(Task("do it", tests={"test.sh": ALWAYS}, steps=(own,))) == []
    (fault,) = find_file_faults(Task("do it", tests={"test.sh": ALWAYS}, steps=(own, step("two"))))
    assert fault.name == "always-1.0"
    assert "it scores the step two" in fault.detail
