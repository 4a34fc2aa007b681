"""Everything that has to pass, in one place for hands, hooks and CI: style, types, and both suites."""

import os
import subprocess
import sys
import time

import pytest

PYTHON = sys.executable
TESTS = [PYTHON, "-m", "pytest", "-q", "--dist", "loadfile"]
# More processes than cores: most tests wait for servers, sockets and deadlines.
STEPS = {
    "style": [
        [PYTHON, "-m", "ruff", "check", "."],
        [PYTHON, "-m", "ruff", "format", "--check", "."],
    ],
    "types": [[PYTHON, "-m", "mypy"]],
    "core": [[*TESTS, "-n", "4", "-m", "not end_to_end"]],
    "plain": [[*TESTS, "-n", "4", "-m", "not end_to_end", "tests/server", "tests/client"]],
    "end-to-end": [[*TESTS, "-n", "3", "--no-loadscope-reorder", "-m", "end_to_end and not cluster"]],
    "cluster": [[PYTHON, "-m", "pytest", "-q", "-m", "cluster"]],
}
TESTED = ("core", "plain", "end-to-end", "cluster")
"""Steps of tests: what fails in one is repeated alone, once."""
VARIABLES = {"plain": {"PADDOCK_FASTPATH": "0"}}
"""The suites of server and client run a second time without the shortcuts of `server/fastpath`."""
BY_HAND = ("cluster",)
"""Run when they are asked for by name: three nodes on one machine take minutes and all of its cores."""
FETCH = [
    [PYTHON, "scripts/peers.py"],
    [PYTHON, "-m", "paddock", "agents", "--install", "all"],
    [PYTHON, "-m", "scripts.browser"],
    [PYTHON, "-m", "scripts.base_image"],
    [PYTHON, "-m", "scripts.debian_packages", "docker-registry", "skopeo"],
]
"""Other people's programs and images that the end-to-end suite needs."""


def run(name: str, command: list[str], variables: dict[str, str]) -> bool:
    """Run a command of a step, and repeat failed tests once: on two shared cores a real deadline may pass by chance.

    The repetition runs one test at a time. What fails again fails the step; what passes then is listed as unstable.
    """
    if name not in TESTED:
        return subprocess.run(command, check=False, env=variables).returncode == 0
    command = [*command, "-o", f"cache_dir=.pytest_cache/{name}"]
    code = subprocess.run(command, check=False, env=variables).returncode
    if code != pytest.ExitCode.TESTS_FAILED:
        return code == pytest.ExitCode.OK
    print(f"{name}: repeating the failed tests, one at a time; those that pass now are unstable", file=sys.stderr)
    again = [*command, "-n", "0", "--last-failed", "--last-failed-no-failures", "none", "-rA"]
    return subprocess.run(again, check=False, env=variables).returncode == pytest.ExitCode.OK


def main(names: list[str]) -> int:
    unknown = set(names) - STEPS.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    # Where this is set, each of hundreds of processes compiles what it imports, seconds of it for some peers.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    failed = []
    chosen = names or [name for name in STEPS if name not in BY_HAND]
    # Installing takes minutes and little processor time: it goes on beside the steps that do not need it.
    fetching = [subprocess.Popen(command) for command in FETCH] if "end-to-end" in chosen else []
    for name in chosen:
        if name == "end-to-end":
            for process in fetching:
                process.wait()
        began = time.monotonic()
        variables = {**os.environ, **VARIABLES.get(name, {})}
        passed = all(run(name, command, variables) for command in STEPS[name])
        print(f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        if not passed:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
