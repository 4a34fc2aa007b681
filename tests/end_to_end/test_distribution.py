"""The wheel and the sdist as a user has them: built once, installed in fresh environments, used outside the clone."""

import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.peers import REPOSITORY, uv

import paddock
from paddock.distribution import NAME, VERSION

from .processes import free_port, quiet_environment, serving

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240, func_only=True)]

STEP = """
import sys
from paddock import SyncClient
with SyncClient(sys.argv[1]) as env:
    env.reset(seed=7)
    print(env.step({"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with nothing but Paddock and what it needs, and a folder away from the clone."""

    root: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "bin" / program, *arguments],
            cwd=self.folder, env=quiet_environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel is built from the sdist, so it has only what the sdist has."""
    folder = tmp_path_factory.mktemp("built")
    uv("build", "--python", sys.executable, "--out-dir", str(folder), str(REPOSITORY))
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def install(place: Path, *distributions: Path) -> Installed:
    root, folder = place / "venv", place / "elsewhere"
    folder.mkdir()
    uv("venv", "--python", sys.executable, str(root))
    add(root, *distributions)
    return Installed(root, folder)


def add(root: Path, *distributions: Path) -> None:
    uv("pip", "install", "--python", str(root / "bin" / "python"), *map(str, distributions))


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    return install(tmp_path_factory.mktemp(request.param), built[request.param])


def test_the_wheel_has_every_file_of_the_package(built: dict[str, Path]) -> None:
    source = Path(paddock.__file__).parent
    there = {str(path.relative_to(source.parent)) for path in source.rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(built["wheel"]).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in there if "__pycache__" not in name}
    data = ("web/static/index.html", "tasks/shipped/replay.json", "cli/template/common/Dockerfile.template")
    assert {f"paddock/{name}" for name in ("py.typed", *data)} <= packed


def test_the_sdist_has_what_its_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("LICENSE", "README.md", "Makefile", "scripts/peers.py", "tests/conftest.py", "docs/fleet.md")
    assert set(needed) <= packed


def test_it_is_installed_under_our_name_and_imported_as_paddock(installed: Installed) -> None:
    assert installed.run("paddock", "--version").stdout.strip() == f"paddock, version {VERSION}"
    code = f"import importlib.metadata as m, paddock; print(m.version({NAME!r}), paddock.__file__)"
    version, file = installed.run("python", "-c", code).stdout.split()
    assert (version, Path(file).is_relative_to(installed.root)) == (VERSION, True)


def test_it_serves_and_steps_outside_the_clone(installed: Installed, tmp_path: Path) -> None:
    port = free_port()
    command: list[str | Path] = [installed.root / "bin" / "paddock", "serve", "echo", "--port", str(port)]
    with serving("paddock", command, port, tmp_path / "log") as server:
        done = installed.run("python", "-c", STEP, server.url)
    assert "hi" in done.stdout, done.stderr


def test_a_new_project_asks_for_our_distribution(installed: Installed) -> None:
    made = installed.run("paddock", "new", "word-game")
    assert made.returncode == 0, made.stderr
    assert f'"{NAME}>={VERSION}"' in (installed.folder / "word-game" / "pyproject.toml").read_text()


def test_doctor_reports_a_foreign_paddock(built: dict[str, Path], tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    (stranger / "paddock").mkdir(parents=True)
    (stranger / "paddock" / "__init__.py").write_text("CARS = []\n")
    (stranger / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling>=1.27"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "paddock"\nversion = "0.0.9"\n'
    )
    place = install(tmp_path, built["wheel"])
    assert finding(place)["status"] == "ok"
    add(place.root, stranger)
    result = finding(place)
    assert (result["status"], "paddock 0.0.9" in result["detail"]) == ("problem", True)
    assert "overwritten" in result["detail"]
    assert result["hint"] == "pip uninstall paddock && pip install --force-reinstall paddock-rl"


def finding(place: Installed) -> dict[str, str]:
    completed = place.run("paddock", "doctor", "--json")
    return next(each for each in json.loads(completed.stdout)["findings"] if each["name"] == "paddock")
