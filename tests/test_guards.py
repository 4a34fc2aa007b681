"""The edges of the package: what it exports, what it weighs, which way its imports point."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddock
import paddock.errors

SOURCE = Path(paddock.__file__).parent
ERRORS = {
    name
    for name, value in vars(paddock.errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_"
}
EXPORTED = ERRORS | {
    "Action",
    "CallResult",
    "Client",
    "Environment",
    "Observation",
    "Reconnect",
    "State",
    "StepResult",
    "SyncClient",
    "Timeouts",
    "ToolEnvironment",
    "ToolReturn",
    "VectorClient",
    "__version__",
    "create_app",
    "serve",
    "tool",
}
NEVER = ("ray", "mcp", "gymnasium", "numpy", "openenv")
HEAVY = (*NEVER, "starlette", "uvicorn", "uvloop", "picows", "websockets", "anyio", "click", "rich")


# -- exports --------------------------------------------------------------------------------------


def test_the_exported_names_are_these() -> None:
    assert set(paddock.__all__) == EXPORTED
    assert set(dir(paddock)) == EXPORTED


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(paddock, name) is not None


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Environmint"):
        paddock.Environmint  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert seen == EXPORTED - {"__version__"}


def test_the_package_is_typed_and_its_version_is_one() -> None:
    assert importlib.metadata.version("paddock-rl") == paddock.__version__
    assert (SOURCE / "py.typed").exists()


# -- weight ---------------------------------------------------------------------------------------


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout


def test_importing_paddock_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import paddock; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.5


def test_writing_an_environment_is_quick() -> None:
    """Most of the time is pydantic's, which every environment needs."""

    def seconds(imports: str) -> float:
        return float(python(f"import time; t = time.process_time(); {imports}; print(time.process_time() - t)"))

    needed = "from pydantic import BaseModel, TypeAdapter"
    assert min(seconds("from paddock import Environment") / seconds(needed) for _ in range(3)) < 2.5


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("import paddock", HEAVY),
        ("from paddock import Action, Environment, Observation, State, StepResult, ToolEnvironment, tool", HEAVY),
        ("from paddock import Reconnect, Timeouts", HEAVY),
        ("from paddock import Client", (*NEVER, "starlette", "uvicorn", "click", "rich")),
        ("from paddock import create_app", (*NEVER, "click", "rich")),
    ],
    ids=["paddock", "environments", "policies", "client", "server"],
)
def test_nothing_heavy_is_loaded(imports: str, heavy: tuple[str, ...]) -> None:
    loaded = python(f"{imports}; import sys; print(*sys.modules)").split()
    assert [name for name in loaded if name.partition(".")[0] in heavy] == []


def test_the_base_install_has_at_most_25_packages() -> None:
    assert len(closure("paddock-rl")) <= 25


def closure(name: str) -> set[str]:
    """A distribution and all that it needs on this machine, extras left out."""
    collected: set[str] = set()
    waiting = [name]
    while waiting:
        current = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if current in collected:
            continue
        try:
            required = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        collected.add(current)
        waiting += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required if "extra ==" not in text]
    return collected


# -- direction ------------------------------------------------------------------------------------

# Every part imports only parts that stand before it, so no two parts import each other.
ORDER = [
    *[
        "lazy",
        "distribution",
        "seccomp",
        "errors",
        "types",
        "field_types",
        "limits",
        "loopback",
        "config",
        "processes",
        "child_process",
        "loop_thread",
        "retry",
        "shielded",
        "loading",
    ],
    *["sqlite", "net", "http_pool", "protocol", "rubric", "tools", "env", "telemetry"],
    *["sessions", "server", "client"],
    *["sandbox", "tasks", "models", "capture", "agents", "store", "rollouts"],
    *["envs", "adapters", "targets", "fleet", "e2b_server", "export", "train", "scale"],
    *["web", "testing", "cli", "__main__"],
]
PROTOCOL_MAY_USE = {"pydantic", "pydantic_core", "orjson", "paddock"}


def modules() -> list[Path]:
    return sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if "template" not in path.parts)


def imported(path: Path) -> Iterator[str]:
    """Full names of what a module imports when it runs; imports for type checkers are left out."""
    yield from _imported(ast.parse((SOURCE / path).read_text()))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imported(child)


def part_of(name: str) -> str | None:
    """The part of Paddock that an imported name belongs to; None for what is not ours."""
    root, _, rest = name.partition(".")
    return (rest.partition(".")[0] or "__init__") if root == "paddock" else None


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {path.parts[0].removesuffix(".py") for path in modules()} - {"__init__"}
    assert sorted(parts) == sorted(ORDER)


@pytest.mark.parametrize("path", [path for path in modules() if path != Path("__init__.py")], ids=str)
def test_imports_point_one_way(path: Path) -> None:
    own = path.parts[0].removesuffix(".py")
    earlier = {*ORDER[: ORDER.index(own) + 1], "__init__", "__version__"}
    assert {part for name in imported(path) if (part := part_of(name)) is not None} <= earlier


@pytest.mark.parametrize("path", [path for path in modules() if path.parts[0] == "protocol"], ids=str)
def test_the_protocol_needs_nothing_but_pydantic_and_orjson(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imported(path)}
    assert roots - set(sys.stdlib_module_names) <= PROTOCOL_MAY_USE


@pytest.mark.parametrize("path", [path for path in modules() if path.parts[0] == "protocol"], ids=str)
def test_the_protocol_does_no_io(path: Path) -> None:
    forbidden = {"asyncio", "socket", "threading", "time", "selectors", "ssl", "subprocess", "os", "random"}
    assert {name.partition(".")[0] for name in imported(path)} & forbidden == set()


def test_the_six_files_to_read_first_are_there() -> None:
    serving = ("env.py", "protocol/episode.py", "sessions/dispatch.py", "server/ws.py")
    named = (*serving, "client/client.py", "rollouts/rollout.py")
    assert all((SOURCE / name).exists() for name in named)


# -- names ----------------------------------------------------------------------------------------

SHARED_CLASS_NAMES = {
    "CallToolAction": "OpenEnv and Fleet both have it",
    "ListToolsAction": "OpenEnv and Fleet both have it",
    "Refused": "loaders of child processes import nothing of ours; the host knows the error by its name",
}


def test_a_class_name_has_one_meaning() -> None:
    homes: dict[str, list[Path]] = {}
    for path in modules():
        if "shipped" not in path.parts:
            for node in ast.parse((SOURCE / path).read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(path)
    assert {name for name, paths in homes.items() if len(paths) > 1} == SHARED_CLASS_NAMES.keys()


# -- documentation --------------------------------------------------------------------------------

PUBLIC_PACKAGES = (
    "paddock",
    "paddock.fleet",
    "paddock.models",
    "paddock.rollouts",
    "paddock.sandbox",
    "paddock.testing",
)


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_public_functions_and_methods_have_docstrings(package: str) -> None:
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    for name, value in list(public.items()):
        if isinstance(value, type):
            # Methods that pydantic and the standard library define are theirs.
            members = inspect.getmembers(
                value, lambda member: inspect.isroutine(member) or isinstance(member, property)
            )
            public |= {f"{name}.{member}": each for member, each in members if member[0] != "_" and is_ours(each)}
    assert [name for name, value in public.items() if callable_or_property(value) and not inspect.getdoc(value)] == []


def is_ours(member: object) -> bool:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", "")).startswith("paddock")


def callable_or_property(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, type | property)


# -- settings -------------------------------------------------------------------------------------

CHILD = "builds the environment of a child process"
READS_ENVIRON = {
    "adapters/mcp.py": "`NAME=$OTHER` in front of a command takes the value of a variable",
    "adapters/openenv.py": "passes its own environment through exec, with a mark in it",
    "client/mcp/stdio.py": CHILD,
    "config.py": "declares the settings",
    "fleet/instance/environment.py": "sets the variables of the hosted environment in its own process",
    "fleet/instance/verifier/runner.py": CHILD,
    "fleet/plane/processes.py": CHILD,
    "sandbox/process.py": CHILD,
    "scale/cluster.py": "sets a variable for the processes that Ray starts",
    "sessions/isolation/process.py": CHILD,
    "testing/sandbox/commands.py": "sets a variable that a sandbox must not pass on",
}
"""Modules that touch `os.environ`, with the reason. Settings are declared in `paddock/config.py`."""


def test_settings_are_read_in_one_module() -> None:
    touching = {str(path) for path in modules() if touches_environ(ast.parse((SOURCE / path).read_text()))}
    assert touching == set(READS_ENVIRON)


def touches_environ(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv"))
        or (isinstance(node, ast.keyword) and node.arg in ("envvar", "auto_envvar_prefix"))
        for node in ast.walk(tree)
    )


VAGUE_NAMES = {"asked", "found", "given", "heard", "known", "moved", "said", "shown", "told", "watched"}
"""A name says what a value holds. These say only how it was obtained."""


def definitions(path: Path) -> Iterator[tuple[str, int]]:
    """The names that a module binds, each with its line."""
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("path", [path for path in modules() if "shipped" not in path.parts], ids=str)
def test_names_say_what_they_hold(path: Path) -> None:
    vague = [f"{name}, line {line}" for name, line in definitions(path) if name.strip("_").lower() in VAGUE_NAMES]
    assert vague == []


# -- the name on the package index ------------------------------------------------------------------

REPOSITORY = SOURCE.parent.parent
TEXTS = ("README.md", "pyproject.toml", "docs/**/*.md", "examples/**/*", "src/**/*", "scripts/*.py", "Makefile")
BARE_NAME = re.compile(r"\b(install|add|uvx)\b[^|#&;]*[ '\"]paddock(?=[\[ '\"`=<>~]|$)|\bpaddock\[(?=[a-z])")
COMMAND = re.compile(r"paddock (serve|doctor|e2b|fleet|rollout|agents|new|view|check|trace|user)\b")


def test_no_text_installs_the_foreign_distribution() -> None:
    """`paddock` on PyPI is somebody else's: whoever follows our words must get `paddock-rl`."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for pattern in TEXTS
        for path in REPOSITORY.glob(pattern)
        if path.is_file() and path.suffix not in (".zst", ".pyc")
        for line in path.read_text(encoding="utf-8").splitlines()
        if BARE_NAME.search(COMMAND.sub("", line))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line", ["pip install paddock", "pip install 'paddock[ray]'", "uv add paddock", "install paddock[local]"]
)
def test_the_foreign_name_would_be_noticed(line: str) -> None:
    assert BARE_NAME.search(line)
