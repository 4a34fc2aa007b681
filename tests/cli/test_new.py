import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paddock.cli.new import TOOLS, TYPED, Kind, Project, class_name, plan, write
from paddock.errors import ConfigError

from .processes import paddock


@pytest.fixture(params=[TYPED, TOOLS], ids=["typed", "tools"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    kind: Kind = request.param
    planned = plan("word-game", tmp_path)
    write(planned, kind)
    return planned


def run(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a module in the project's folder, without writing into it."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project.path, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip


def test_the_project_has_its_files(project: Project) -> None:
    written = {str(file.relative_to(project.path)) for file in project.path.rglob("*") if file.is_file()}
    assert written == {
        ".dockerignore",
        ".gitignore",
        "Dockerfile",
        "README.md",
        "pyproject.toml",
        "tests/test_env.py",
        "word_game/__init__.py",
        "word_game/env.py",
        "word_game/py.typed",
    }
    assert not [file for file in project.path.rglob("*") if file.is_file() and "{{" in file.read_text()]


def test_its_own_test_passes(project: Project) -> None:
    done = run(project, "pytest", "-q", "-p", "no:cacheprovider", "-W", "error")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_it_is_clean_and_typed(project: Project) -> None:
    for command in (["ruff", "check", "--no-cache"], ["ruff", "format", "--check", "--no-cache"]):
        assert run(project, *command, ".").returncode == 0
    typed = run(project, "mypy", "--strict", "--cache-dir", "/dev/null")
    assert typed.returncode == 0, typed.stdout


def test_it_conforms(project: Project) -> None:
    done = paddock("check", project.target, "--json", cwd=project.path)
    counts = json.loads(done.stdout)["counts"]
    assert (done.returncode, counts.keys()) == (0, {"passed", "skipped"})


def test_it_serves(project: Project) -> None:
    command = [sys.executable, "-m", "paddock", "serve", project.target, "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=project.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        output = json.loads(server.stdout.readline())
        server.terminate()
        server.wait(20)
    assert output["environment"] == "wordgameenv"


def test_pyproject_is_installable(project: Project) -> None:
    described = tomllib.loads((project.path / "pyproject.toml").read_text())
    assert described["project"]["name"] == "word-game"
    assert described["project"]["dependencies"][0].startswith("paddock-rl>=")
    assert described["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["word_game"]


def test_the_readme_and_the_container_name_the_target(project: Project) -> None:
    assert "paddock serve word_game.env:WordGameEnv" in (project.path / "README.md").read_text()
    assert '"word_game.env:WordGameEnv"' in (project.path / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["a", "environment", "state", "tool", "zebra", "x" * 40, "Mixed-Case_9"])
@pytest.mark.parametrize("kind", [TYPED, TOOLS], ids=["typed", "tools"])
def test_any_good_name_gives_good_code(name: str, kind: Kind, tmp_path: Path) -> None:
    project = plan(name, tmp_path)
    write(project, kind)
    for command in (["ruff", "check", "--no-cache"], ["ruff", "format", "--check", "--no-cache"]):
        done = run(project, *command, ".")
        assert done.returncode == 0, done.stdout
    source = (project.path / project.package / "env.py").read_text()
    defined = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert defined.count(project.class_name) == 1


def test_class_names_end_in_env() -> None:
    assert [class_name(name) for name in ("word_game", "maze_env", "env", "go2")] == [
        "WordGameEnv",
        "MazeEnv",
        "Env",
        "Go2Env",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("1st", "no Python name"),
        ("word game", "no Python name"),
        ("a/b", "no Python name"),
        ("../up", "no Python name"),
        ("_a", "no Python name"),
        ("a-", "no Python name"),
        ("", "no Python name"),
        ("größe", "no Python name"),
        ("a\n", "no Python name"),
        ("class", "word of Python"),
        ("json", "package already"),
        ("paddock", "package already"),
        ("tests", "package already"),
        ("x" * 41, "longer than 40"),
    ],
)
def test_a_bad_name_is_refused_and_nothing_written(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        plan(name, tmp_path)
    assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "maze").mkdir()
    (tmp_path / "maze" / "mine.txt").write_text("precious")
    done = paddock("new", "maze", cwd=tmp_path)
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert "hint: choose another name" in done.stderr
    assert [file.name for file in (tmp_path / "maze").iterdir()] == ["mine.txt"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = paddock("new", "maze", "--dir", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "hint: create it first" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_project_that_cannot_be_finished_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = plan("maze", tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "env.py")

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(ConfigError, match="No space left"):
        write(project, TYPED)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_write_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"cannot write '.*/maze': No space left"):
        write(plan("maze", tmp_path), TYPED)


def test_the_next_three_commands_are_reported(tmp_path: Path) -> None:
    (tmp_path / "my games").mkdir()
    done = paddock("new", "maze", "--tools", "--dir", "my games", cwd=tmp_path)
    assert done.returncode == 0
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "cd 'my games/maze'",
        "pip install -e '.[dev]' && pytest",
        "paddock serve maze.env:MazeEnv",
    ]


def test_the_new_project_is_printed_as_json(tmp_path: Path) -> None:
    made = json.loads(paddock("new", "maze", "--json", cwd=tmp_path).stdout)
    assert (made["path"], made["target"]) == ("maze", "maze.env:MazeEnv")
    assert "maze/env.py" in made["files"]
