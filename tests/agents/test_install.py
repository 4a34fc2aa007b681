"""Agent programs in the cache: fetched once, whole or not at all, and nothing but what is wanted."""

import asyncio
import io
import sys
import tarfile
from pathlib import Path

import pytest

from paddock.agents import install
from paddock.agents.install import (
    fetch_npm_binary,
    fetch_npm_tree,
    fetch_python_tool,
    is_installed,
    keep_only,
    node_mounts,
    only_cached,
    tool_python,
)
from paddock.agents.pi import Pi
from paddock.errors import AgentError

NPM = """#!/bin/sh
echo "$@" >> {log}
{fault}
case "$1" in
pack)
    while [ $# -gt 1 ]; do [ "$1" = --pack-destination ] && cp {archive} "$2/p.tgz"; shift; done ;;
install)
    while [ $# -gt 1 ]; do
        [ "$1" = --prefix ] && mkdir -p "$2/node_modules/tool/docs" "$2/node_modules/dep" &&
            echo 1 > "$2/node_modules/tool/cli.js" && echo 2 > "$2/node_modules/tool/docs/a.md" &&
            echo 3 > "$2/node_modules/dep/index.js"
        shift
    done ;;
esac
"""


class Registry:
    """A program `npm` that fetches from a local archive, and its command lines."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "npm.log"
        self.agents = folder / "agents"
        self._program = folder / "bin" / "npm"
        self._archive = folder / "archive.tgz"
        self._program.parent.mkdir()
        self.publish({"bin/node": b"node", "bin/rg": b"rg", "cli.js": b"1", "docs/a.md": b"2", "../up": b"!"})
        self.fail_with("")

    def publish(self, members: dict[str, bytes]) -> None:
        with tarfile.open(self._archive, "w:gz") as packed:
            for name, content in members.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))

    def fail_with(self, fault: str) -> None:
        self._program.write_text(NPM.format(log=self.log, archive=self._archive, fault=fault))
        self._program.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry(tmp_path)
    monkeypatch.setenv("PADDOCK_AGENTS", str(registry.agents))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return registry


def tree(**options: object) -> Path:
    return asyncio.run(fetch_npm_tree("tool", "1.0", lambda line: None, timeout=10, **options))  # type: ignore[arg-type]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_tree_has_the_package_and_its_dependencies(npm: Registry) -> None:
    folder = tree(node=False)
    assert files(folder) == {f"node_modules/{name}" for name in ("tool/cli.js", "tool/docs/a.md", "dep/index.js")}
    (command,) = npm.commands
    assert "--ignore-scripts" in command
    assert "--omit optional" in command
    assert command.endswith("tool@1.0")


def test_a_bundled_package_is_fetched_without_dependencies(npm: Registry) -> None:
    folder = tree(node=False, alone=True, only=("tool/cli.js", "tool/bin"))
    assert files(folder) == {f"node_modules/tool/{name}" for name in ("cli.js", "bin/node", "bin/rg")}
    assert not (npm.agents / "up").exists()
    assert npm.commands[0].startswith("pack ")


def test_the_interpreter_is_fetched_and_can_be_mounted(npm: Registry) -> None:
    tree()
    (mount,) = node_mounts()
    assert (mount.source / "node").read_bytes() == b"node"
    assert f"{mount.target}/node" == install.NODE


def test_it_is_fetched_once(npm: Registry) -> None:
    async def all_at_once() -> None:
        log: list[str] = []
        await asyncio.gather(*(fetch_npm_tree("tool", "1.0", log.append, timeout=10, node=False) for _ in range(5)))
        assert log == ["fetching tool-1.0-tree", "tool-1.0-tree is in the cache"]

    asyncio.run(all_at_once())
    tree(node=False)
    assert len(npm.commands) == 1


@pytest.mark.parametrize(
    ("fault", "message"), [("echo no such version >&2; exit 1", "no such version"), ("exec sleep 30", "in 0.2 s")]
)
def test_a_fetch_that_fails_leaves_nothing(npm: Registry, fault: str, message: str) -> None:
    npm.fail_with(fault)
    with pytest.raises(AgentError, match=message) as caught:
        asyncio.run(fetch_npm_tree("tool", "1.0", lambda line: None, timeout=0.2))
    assert caught.value.hint
    assert [path.name for path in npm.agents.iterdir() if not path.name.endswith(".lock")] == []


def test_a_changed_layout_is_reported_and_leaves_nothing(npm: Registry) -> None:
    with pytest.raises(AgentError, match="nothing matches"):
        tree(node=False, only=("tool/dist",))
    with pytest.raises(AgentError, match="has no package/bin/gone"):
        asyncio.run(fetch_npm_binary("tool", "1.0", "bin/gone", lambda line: None, timeout=10))
    assert [path.name for path in npm.agents.iterdir() if path.is_dir()] == []


def test_without_npm_the_error_has_a_hint(npm: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AgentError, match="npm is needed once") as caught:
        tree(node=False)
    assert "Node.js" in (caught.value.hint or "")


def test_only_cached_fetches_nothing(npm: Registry) -> None:
    with only_cached(), pytest.raises(AgentError, match="not on this machine"):
        tree(node=False)
    assert npm.commands == []
    assert tree(node=False).is_dir()
    with only_cached():
        assert tree(node=False).is_dir()


def test_an_agent_is_installed_when_all_its_parts_are(npm: Registry) -> None:
    agent = Pi()
    assert not asyncio.run(is_installed(agent))
    npm.publish({"dist/bundle/cli.js": b"1", "package.json": b"{}", "bin/node": b"node"})
    done = asyncio.run(agent.install(lambda line: None, timeout=10))
    assert "is in the cache" in done.log
    assert len(done.mounts) == 2
    assert asyncio.run(is_installed(agent))
    assert asyncio.run(agent.install(lambda line: None, timeout=10)).log == ""


def test_keep_only_drops_what_no_pattern_matches(tmp_path: Path) -> None:
    for name in ("a/x.js", "a/y.md", "b/c/d.js", "b/c/e.js"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text(name)
    keep_only(tmp_path / "m", ("a/*.js", "b", "b/c/d.js"))
    assert files(tmp_path) == {"m/a/x.js", "m/b/c/d.js", "m/b/c/e.js"}


def test_a_python_tool_is_compiled_for_the_sandbox(npm: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []

    def fetcher(command: list[str], folder: Path, spec: str, timeout: float) -> None:
        runs.append(list(command))
        if "--target" in command:
            Path(command[command.index("--target") + 1], "a_tool-1.0.dist-info").mkdir()

    monkeypatch.setattr(install, "run_fetcher", fetcher)
    for _ in range(2):
        folder = asyncio.run(fetch_python_tool("a-tool", "1.0", ("dep==2",), lambda line: None, timeout=10))
    fetched, compiled = runs
    assert fetched[-2:] == ["a-tool==1.0", "dep==2"]
    assert "--no-deps" in fetched
    assert fetched[fetched.index("--python-version") + 1] == tool_python().version
    assert compiled[0] == tool_python().program
    assert folder.name == f"a-tool-1.0-py{tool_python().version.replace('.', '')}"


def test_an_interpreter_that_is_too_old_is_replaced_by_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "OLDEST_TOOL_PYTHON", (9, 0))
    python = tool_python()
    assert python.version == f"{sys.version_info.major}.{sys.version_info.minor}"
    (mount,) = python.mounts
    assert Path(python.program).is_relative_to(mount.source)
