import importlib.metadata
import json
import re
import resource
import shutil
import socket
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddock.cli import doctor, run
from paddock.distribution import EXTRAS
from paddock.errors import SandboxError
from paddock.sandbox import bwrap

from .processes import paddock


def test_findings_are_printed_as_a_table() -> None:
    done = paddock("doctor")
    for name in ("python", "uvloop", "picows", "open files", "memory", "disk", "gymnasium", "bubblewrap"):
        assert name in done.stdout
    assert "problem" in done.stderr
    assert done.returncode == (1 if "✗" in done.stdout else 0)


def test_findings_are_printed_as_json() -> None:
    done = paddock("doctor", "--json")
    document = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert len(findings) == len(doctor.BASICS) + len(doctor.PURPOSES) + len(doctor.PROGRAMS)
    assert {finding["status"] for finding in findings.values()} <= {"ok", "missing", "problem"}
    assert findings["paddock"]["detail"] == importlib.metadata.version("paddock-rl")
    assert all(finding["hint"] for finding in findings.values() if finding["status"] != "ok")
    assert document["ok"] == (done.returncode == 0)


def test_only_a_problem_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.Finding("a", "missing", "", "get it")
    problem = doctor.Finding("b", "problem", "", "mend it")
    for findings, code in (([missing], 0), ([missing, problem], 1)):
        monkeypatch.setattr(doctor, "examine", lambda findings=findings: findings)
        assert run(["doctor", "--json"]) == code


def test_a_taken_port_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(doctor, "DEFAULT_PORT", listening.getsockname()[1])
        finding = doctor.port()
    assert (finding.status, doctor.port().status) == ("missing", "ok")
    assert "--port 0" in (finding.hint or "")


@pytest.mark.parametrize(
    ("soft", "hard", "status"),
    [
        (100, 4096, "problem"),
        (1024, 4096, "missing"),
        (8192, 8192, "ok"),
        (-1, -1, "ok"),
        (1024, -1, "missing"),
    ],
)
def test_few_open_files_are_reported(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    finding = doctor.open_files()
    assert finding.status == status
    assert (finding.hint is None) == (status == "ok")


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (sys.version_info[0], sys.version_info[1] + 1))
    assert doctor.python().status == "problem"


def test_what_paddock_needs_and_lacks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _: None)
    assert [check().status for check in (doctor.uvloop, doctor.httptools, doctor.picows)] == [
        "missing",
        "problem",
        "problem",
    ]


def test_what_is_missing_is_installed_by_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.extra("no-such-distribution", "nothing at all")
    assert (finding.status, finding.hint) == ("missing", "pip install no-such-distribution")
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert doctor.extra("aiohttp", "rollouts").hint == "pip install 'paddock-rl[rollouts]'"


def test_each_extra_brings_the_packages_that_hints_name_it_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    brought = {
        (re.split(r"[^\w-]", requirement, maxsplit=1)[0], extra)
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
    }
    assert EXTRAS.items() <= brought


def test_little_room_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    monkeypatch.setattr(doctor, "available_memory", lambda: 10_000_000)
    assert (doctor.disk().status, doctor.memory().status) == ("problem", "problem")


def test_bubblewrap_that_cannot_be_found_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise SandboxError("bubblewrap is not installed", hint="install it")

    assert doctor.bubblewrap().status == "ok"
    monkeypatch.setattr(bwrap, "find_bwrap", nowhere)
    finding = doctor.bubblewrap()
    assert (finding.status, finding.hint) == ("missing", "install it")


def test_refused_namespaces_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "UNSHARE", "import sys; sys.exit('Operation not permitted')")
    finding = doctor.user_namespaces()
    assert (finding.status, finding.detail) == ("missing", "refused: Operation not permitted")


def test_programs_that_are_not_there_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert (doctor.node().status, doctor.npm().status) == ("missing", "missing")


def test_a_program_that_does_not_run_is_reported(tmp_path: Path) -> None:
    assert doctor.first_line([str(tmp_path / "nothing")]) == "does not run: FileNotFoundError"
