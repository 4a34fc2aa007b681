"""What `paddock check` reports about tests that run the agent's program in their own sandbox."""

import pytest

from paddock.tasks.task import Task
from paddock.tasks.unprotected_runs import find_unprotected_runs


def found(test: str, **tests: str) -> list[str]:
    files = {"test.sh": test.encode(), **{name.replace("_py", ".py"): text.encode() for name, text in tests.items()}}
    task = Task(instruction="Write prog.py.", files={"given.py": b""}, tests=files)
    return [str(run).partition(": ")[0] for run in find_unprotected_runs(task)]


@pytest.mark.parametrize(
    "line",
    [
        "python3 prog.py",
        "timeout 5 python3 prog.py < /tests/input > /tmp/out",
        "X=1 python3 -u ./prog.py | grep -qx hello && echo 1 > /logs/verifier/reward.txt",
        'out=$(python3 prog.py "$x")',
        "./run",
        "if ./run; then true; fi",
        "/home/user/workdir/run",
        "bash ./build.sh",
        "node index.js",
        "make test",
        "npm test",
        "git status --porcelain",
        "git diff | wc -l",
        "pytest -q",
        "python3 -m pytest",
        "python3 -m unittest test_given",
        "python3 -c 'import given; print(given.f())'",
        "python3 -c 'from prog import main'",
        "source env.sh",
        "bash -c 'python3 prog.py'",
        "timeout 5 \\\n  python3 prog.py",
        "python3 - <<'PY'\nfrom prog import f\nPY",
        "python3 -m pytest /tests/test_outputs.py",
        "python3 -m json.tool answer.json",
        "python3 -c 'import json, sys'",
        "python3 <<'PY'\nimport json\nPY",
    ],
)
def test_a_run_without_paddock_run_is_found(line: str) -> None:
    assert found(f"#!/bin/bash\n{line}\n") == ["tests/test.sh:2"]


@pytest.mark.parametrize(
    "line",
    [
        "paddock-run python3 prog.py",
        "timeout 5 paddock-run ./run > /tmp/out",
        "paddock-run git status",
        "python3 -I /tests/check.py",
        'exec python3 -I -B "$(dirname "$0")/check.py"',
        "bash /tests/helper.sh",
        "pytest /tests/test_outputs.py -rA",
        "grep -q x answer.txt && cat prog.py",
        "# python3 prog.py",
        "echo 'run python3 prog.py'",
        "python3 --version; git --version; git config --global user.name x",
        "python3 -I - <<'PY'\nimport json\nmake = 1\nPY",
        "python3 -Ic 'import json, sys'",
        "python3 -P -m pytest /tests/test_outputs.py",
        "python3 -c 'import os, sys; print(1 / 3)'",
        "cd /tests; python3 -m pytest test_outputs.py",
        "timeout 5 \\\n  paddock-run \\\n  python3 prog.py",
        "source $HOME/.local/bin/env; ~/.local/bin/uv --help",
        "bash -n build.sh",
        "cat <<EOF\n./run\nEOF",
        "diff out.txt /tests/expected.txt",
    ],
)
def test_what_runs_nothing_of_the_agent_is_not_reported(line: str) -> None:
    assert found(f"#!/bin/bash\n{line}\n") == []


@pytest.mark.parametrize(
    ("code", "is_reported"),
    [
        ("import prog", True),
        ("from given import f", True),
        ("import subprocess, sys\nsubprocess.run([sys.executable, 'prog.py'])", True),
        ("import subprocess\nsubprocess.check_output('./run --fast', shell=True)", True),
        ("import os\nos.system('git status')", True),
        ("import subprocess\nsubprocess.run(['paddock-run', 'python3', 'prog.py'])", False),
        ("import subprocess\nsubprocess.run(['paddock-run', *words], timeout=5)", False),
        ("import subprocess\nsubprocess.run(['python3', '/tests/helper.py'])", False),
        ("import json, numpy, pytest, helper", False),
        ("import importlib\nimportlib.import_module('prog')", True),
        ("import runpy\nrunpy.run_path('/home/user/workdir/prog.py')", True),
        ("import importlib.util\nimportlib.util.spec_from_file_location('m', 'prog.py')", True),
        ("import importlib\nimportlib.import_module('helper')", False),
        ("run(['python3', 'prog.py'])", False),
    ],
)
def test_python_files_are_read_too(code: str, is_reported: bool) -> None:
    assert bool(found("python3 -I /tests/check.py", check_py=code)) is is_reported
