"""Settings of the machine's own tools, read from files and variables."""

import asyncio
from pathlib import Path

import pytest

from paddock.sandbox.network import machine_settings, registries
from paddock.sandbox.network.access import AccessRules, ConnectionRefusal
from paddock.sandbox.network.machine_settings import MachineSettings, read_machine_settings
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.sandbox.network.registries import Registries
from paddock.sandbox.network.upstream_proxy import find_upstream_proxy, is_excluded

VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_CERT", "PIP_CONFIG_FILE", "UV_INDEX")
MORE = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "NPM_CONFIG_REGISTRY", "npm_config_registry", "NPM_CONFIG_USERCONFIG")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*VARIABLES, *MORE, "XDG_CONFIG_HOME", "UV_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(machine_settings, "APT_FOLDER", tmp_path / "apt")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_files_are_read_without_credentials_and_folders(home: Path) -> None:
    write(
        home / ".config/pip/pip.conf",
        "[global]\nindex-url = https://me:secret@pip.example/simple\n"
        "extra-index-url = file:///srv/index\n  https://extra.example:8443/simple\ntrusted-host = pip.example\n",
    )
    write(home / ".config/uv/uv.toml", '[[index]]\nurl = "https://uv.example/simple"\ndefault = true\n')
    npm = "; x\nregistry=https://npm.example/\n//npm.example/:_authToken=secret\n@team:registry=https://t.example/\n"
    write(home / ".npmrc", npm)
    apt = "# deb http://no.example/\ndeb [arch=amd64] http://apt.example/debian stable main\n"
    write(home / "apt/sources.list", apt)
    sources = "Types: deb\nURIs: http://a.example/x\n https://b.example/y\n\nEnabled: no\nURIs: http://c.example\n"
    write(home / "apt/sources.list.d/a.sources", sources)
    settings = read_machine_settings()
    assert settings.pip_index == "https://pip.example/simple"
    assert settings.pip_extra_indexes == ("https://extra.example:8443/simple",)
    assert settings.pip_trusted_hosts == ("pip.example",)
    assert settings.uv_index == "https://uv.example/simple"
    assert settings.npm_registry == "https://npm.example/"
    assert settings.npm_scopes == (("@team", "https://t.example/"),)
    assert settings.apt_urls == ("http://apt.example/debian", "http://a.example/x", "https://b.example/y")
    assert "secret" not in repr(settings)


def test_variables_come_before_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / ".config/pip/pip.conf", "[global]\nindex-url = https://file.example/simple\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example/simple")
    settings = read_machine_settings()
    assert settings.pip_index == settings.uv_index == "https://variable.example/simple"


def test_a_broken_file_is_left_out(home: Path) -> None:
    write(home / ".config/pip/pip.conf", "index-url = no section\n")
    write(home / ".config/uv/uv.toml", "=")
    assert read_machine_settings().python_indexes == ()


@pytest.mark.anyio
async def test_only_the_ports_of_a_registry_are_allowed() -> None:
    settings = MachineSettings(pip_index="https://pip.example/simple", apt_urls=("http://apt.example:3142/debian",))
    registries = Registries(settings, find_more=lambda _: ({("files.example", 443)}, True))
    names = ("pip.example", "apt.example", "files.example", "other.example")
    allowed = [
        (name, port) for name in names for port in (80, 443, 3142, 22) if await registries.contains(name, port)
    ]
    usual = [("pip.example", 80), ("pip.example", 443), ("files.example", 80), ("files.example", 443)]
    assert sorted(allowed) == sorted([*usual, ("apt.example", 3142)])


@pytest.mark.anyio
async def test_tools_are_asked_once_for_all_and_again_if_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def find_more(_: MachineSettings) -> tuple[set[tuple[str, int]], bool]:
        calls.append(len(calls) > 0)
        return {("files.example", 443)}, calls[-1]

    shared = Registries(MachineSettings(), find_more=find_more)
    assert all(await asyncio.gather(*(shared.contains("files.example", 443) for _ in range(50))))
    assert calls == [False]
    monkeypatch.setattr(registries, "RETRY_SECONDS", -1.0)
    shared._due_at = 0.0
    for _ in range(3):
        assert await shared.contains("files.example", 443)
    assert calls == [False, True]


@pytest.mark.anyio
async def test_behind_a_proxy_a_registry_need_not_resolve_here() -> None:
    async def fail(name: str) -> tuple[()]:
        raise OSError("no name server")

    urls = MachineSettings(pip_index="https://pip.example/simple")
    settings = Registries(urls, find_more=lambda _: (set(), True))
    rules = AccessRules(NetworkPolicy("allowlist", ("registries",)), registries=settings, resolve=fail)
    assert await rules.admit("pip.example", 443, must_resolve=False) == ()
    with pytest.raises(ConnectionRefusal):
        await rules.admit("pip.example", 443)
    with pytest.raises(ConnectionRefusal):
        await rules.admit("other.example", 443, must_resolve=False)


def test_the_proxy_of_the_machine_keeps_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://me:pass%20word@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost,.inner.example")
    proxy = find_upstream_proxy("https", "a.example")
    assert proxy is not None
    assert (proxy.host, proxy.port, proxy.authorization) == ("proxy.example", 3128, "Basic bWU6cGFzcyB3b3Jk")
    assert "bWU6" not in repr(proxy)
    assert find_upstream_proxy("https", "x.inner.example") is None
    assert find_upstream_proxy("https", "X.Inner.EXAMPLE.") is None
    assert is_excluded("anything", "*")
