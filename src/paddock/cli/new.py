"""`paddock new NAME`."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from paddock.cli import note, print_json
from paddock.distribution import NAME as DISTRIBUTION
from paddock.distribution import VERSION
from paddock.errors import ConfigError

TAKEN = frozenset(("paddock", "paddock_rl", "pydantic", "pytest", "test", "tests"))
MAX_NAME_CHARACTERS = 40
SUFFIX = ".template"

COMMON = {
    "pyproject.toml": "common/pyproject.toml",
    "README.md": "common/README.md",
    "Dockerfile": "common/Dockerfile",
    ".gitignore": "common/gitignore",
    ".dockerignore": "common/dockerignore",
    "{{package}}/__init__.py": "common/__init__.py",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of environment: the folder of its templates, and a line of Python that acts in it."""

    folder: str
    act: str


TYPED = Kind("typed", 'env.step({"number": 50})')
TOOLS = Kind("tools", 'env.call_tool("guess", number=50)')


@dataclass(frozen=True, slots=True)
class Project:
    """A project to be written."""

    name: str
    package: str
    class_name: str
    path: Path

    @property
    def target(self) -> str:
        return f"{self.package}.env:{self.class_name}"


@click.command("new", epilog="NAME: letters, digits, - and _, such as maze or word-game")
@click.argument("name")
@click.option("--tools", is_flag=True, help="An environment whose actions are tool calls, instead of typed actions.")
@click.option("--dir", "parent", default=".", show_default=True, help="Where to put the project's folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the names of the files as JSON.")
def command(name: str, tools: bool, parent: str, as_json: bool) -> None:
    """Start a project for an environment of your own: installable, tested, ready to serve."""
    project = plan(name, Path(parent))
    written = write(project, TOOLS if tools else TYPED)
    commands = next_commands(project)
    if as_json:
        print_json({"path": str(project.path), "target": project.target, "files": written, "next": commands})
        return
    note(f"{project.name}: {len(written)} files in {project.path}. Next:")
    for line in commands:
        click.echo(f"  {line}")


def plan(name: str, parent: Path) -> Project:
    """Derive the names of a project. Raises ConfigError for a name or a folder that cannot be used."""
    package = name.replace("-", "_")
    problem = problem_with(name, package)
    if problem is not None:
        raise ConfigError(f"a project cannot be called {name!r}: {problem[0]}", hint=problem[1])
    if not parent.is_dir():
        raise ConfigError(f"there is no folder {str(parent)!r}", hint="create it first, or leave --dir out")
    path = parent / name
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{str(path)!r} exists already", hint="choose another name, or another folder with --dir")
    return Project(name, package, class_name(package), path)


def problem_with(name: str, package: str) -> tuple[str, str] | None:
    """What is wrong with a name, and what to do about it."""
    if not package.isidentifier() or not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        suggested = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lstrip("0123456789-")
        hint = "begin with a letter, go on with letters, digits, - and _"
        return "it is no Python name", f"try {suggested}: {hint}" if suggested else hint
    if len(name) > MAX_NAME_CHARACTERS:
        return f"it is longer than {MAX_NAME_CHARACTERS} letters", "choose a shorter one"
    if keyword.iskeyword(package):
        return "it is a word of Python itself", f"try {name}-env"
    if package in TAKEN or package in sys.stdlib_module_names:
        return f"{package!r} is a package already", f"try {name}-env"
    return None


def class_name(package: str) -> str:
    """`word_game` is `WordGameEnv`. The ending keeps it apart from every name its module imports."""
    camel = "".join(part[:1].upper() + part[1:] for part in package.split("_"))
    return camel if camel.endswith("Env") else f"{camel}Env"


def write(project: Project, kind: Kind) -> list[str]:
    """Write all files, or none: after an error the folder is removed."""
    files = {
        **COMMON,
        "{{package}}/env.py": f"{kind.folder}/env.py",
        "tests/test_env.py": f"{kind.folder}/test_env.py",
    }
    values = {
        "name": project.name,
        "package": project.package,
        "class": project.class_name,
        "target": project.target,
        "version": VERSION,
        "distribution": DISTRIBUTION,
        "act": kind.act,
    }
    templates = resources.files("paddock.cli") / "template"
    contents = {
        fill(place, values): fill((templates / f"{source}{SUFFIX}").read_text(encoding="utf-8"), values)
        for place, source in files.items()
    }
    try:
        project.path.mkdir()
        for place, text in contents.items():
            file = project.path / place
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (project.path / project.package / "py.typed").touch()
    except OSError as error:
        if not isinstance(error, FileExistsError):
            shutil.rmtree(project.path, ignore_errors=True)
        raise ConfigError(
            f"cannot write {str(error.filename or project.path)!r}: {error.strerror}", hint="choose another --dir"
        ) from error
    return sorted([*contents, f"{project.package}/py.typed"])


def fill(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


def next_commands(project: Project) -> list[str]:
    return [
        f"cd {shlex.quote(os.path.relpath(project.path))}",
        "pip install -e '.[dev]' && pytest",
        f"paddock serve {project.target}",
    ]
