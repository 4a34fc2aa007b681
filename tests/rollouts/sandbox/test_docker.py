"""The docker backend: its wire against a small engine that speaks it, and a real engine where one answers."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.rollouts.ledger import recover
from paddock.rollouts.limits import MEBIBYTE, SandboxLimits
from paddock.rollouts.sandbox import Command, Mount, SandboxSpec, open_sandbox
from paddock.rollouts.sandbox.docker import DockerSandbox, end_marked
from paddock.rollouts.sandbox.engine import Address, AttachedLine, Engine, EngineError, find_address
from paddock.rollouts.store import SandboxEntry, Store
from paddock.rollouts.store.owner import Owner
from paddock.testing.conformance import failed
from paddock.testing.sandbox import check_sandbox
from rollouts.sandbox.fake_engine import FakeEngine
from rollouts.sandbox.places import needs_bwrap

SPEC = SandboxSpec(SandboxLimits(disk_bytes=32 * MEBIBYTE, processes=100, cpus=1))


@asynccontextmanager
async def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(folder, **options) as fake:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{fake.path}")
        yield fake


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[FakeEngine], Any], **options: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(30), engine(folder, monkeypatch, **options) as fake:
            return await act(fake)

    return asyncio.run(main())


# -- where the engine is ----------------------------------------------------------------------------------


def test_the_address_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_TLS_VERIFY", raising=False)
    assert find_address() == Address("/var/run/docker.sock")
    assert find_address("unix:///run/podman/podman.sock").path == "/run/podman/podman.sock"
    elsewhere = find_address("tcp://engine.example:2375")
    assert (elsewhere.is_here, elsewhere.base) == (False, "http://engine.example:2375")
    with pytest.raises(SandboxError, match="cannot be reached"):
        find_address("ssh://me@engine")


def test_certificates_are_needed_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="certificates"):
        find_address("tcp://engine.example")


def test_no_engine_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(SandboxError, match="no container engine answers") as caught:
        asyncio.run(open_sandbox("docker", SPEC))
    assert "DOCKER_HOST" in str(caught.value.hint)


# -- its wire ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "agreed"), [("1.51", "1.47"), ("1.44", "1.44")])
def test_a_version_is_agreed_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, agreed: str) -> None:
    async def act(fake: FakeEngine) -> None:
        async with Engine() as engine:
            assert (engine.version, engine.name) == (agreed, "Fake/1")
            assert await engine.find_marked("paddock.sandbox=none") == []
        assert fake.requests[-1] == ("GET", f"/v{agreed}/containers/json")

    run(tmp_path, monkeypatch, act, version=theirs)


def test_an_engine_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: FakeEngine) -> None:
        with pytest.raises(EngineError, match=r"speaks 1\.24"):
            await Engine().__aenter__()

    run(tmp_path, monkeypatch, act, version="1.24")


def test_what_the_engine_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: FakeEngine) -> None:
        async with Engine() as engine:
            with pytest.raises(EngineError, match="No such container: containers/none/start") as caught:
                await engine.start("none")
            assert caught.value.status == 404
            with pytest.raises(EngineError, match="does not attach"):
                await engine.attach("none")
            await engine.remove("none")

    run(tmp_path, monkeypatch, act)


def test_a_missing_image_is_pulled_and_a_failed_pull_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fake: FakeEngine) -> None:
        async with Engine() as engine:
            await engine.ensure_image("registry.example:5000/some/image")
            assert "registry.example:5000/some/image:latest" in fake.images
            with pytest.raises(EngineError, match="unexpected EOF"):
                await engine.ensure_image("broken:1")
            with pytest.raises(EngineError, match="pull access denied"):
                await engine.ensure_image("private/image:2")

    run(tmp_path, monkeypatch, act)


def test_outputs_are_taken_apart_however_they_are_cut() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        line = AttachedLine(reader, None)  # type: ignore[arg-type]
        frames = b"".join(
            struct.pack(">BxxxI", kind, len(data)) + data
            for kind, data in ((2, b"complaint"), (1, b""), (1, b"first"), (1, b"second"))
        )
        feeding = asyncio.ensure_future(feed(reader, frames))
        assert [await line.receive() for _ in range(3)] == [b"first", b"second", b""]
        assert bytes(line.said) == b"complaint"
        await feeding

    async def feed(reader: asyncio.StreamReader, data: bytes) -> None:
        for byte in data:
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        reader.feed_eof()

    asyncio.run(main())


def test_a_frame_of_no_known_kind_is_an_error() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack(">BxxxI", 9, 1) + b"x")
        with pytest.raises(SandboxError, match="does not send what it should"):
            await AttachedLine(reader, None).receive()  # type: ignore[arg-type]

    asyncio.run(main())


# -- sandboxes --------------------------------------------------------------------------------------------


def test_a_container_is_described_with_all_its_limits() -> None:
    spec = SandboxSpec(SPEC.limits, mounts=(Mount(Path("/opt/x"), PurePosixPath("/opt/agent")),))
    asked = DockerSandbox("sb-1", spec)._described(["/opt/x"])
    host = asked["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["AutoRemove"]) == ("none", True, True)
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert (host["PidsLimit"], host["NanoCpus"], host["Memory"]) == (101, 10**9, host["MemorySwap"])
    assert host["Memory"] > SPEC.limits.memory_bytes
    sizes = [int(options.rpartition("=")[2]) for options in host["Tmpfs"].values()]
    assert sum(sizes) + host["ShmSize"] == SPEC.limits.disk_bytes
    assert host["Mounts"] == [{"Type": "bind", "Source": "/opt/x", "Target": "/opt/agent", "ReadOnly": True}]
    assert asked["Labels"]["paddock.sandbox"] == "sb-1"
    assert asked["User"] == "1000:1000"


@needs_bwrap
def test_a_container_runs_commands_and_is_gone_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(fake: FakeEngine) -> None:
        async with await open_sandbox("docker", SPEC) as sandbox:
            assert len(fake.containers) == 1
            done = await sandbox.exec(Command("cat; echo wrong >&2; exit 3", stdin=b"given"), timeout=10)
            assert (done.exit_code, done.stdout, done.stderr) == (3, b"given", b"wrong\n")
        assert fake.containers == {}

    run(tmp_path, monkeypatch, act)


@needs_bwrap
def test_a_container_whose_owner_is_gone_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fake: FakeEngine) -> None:
        sandbox: Any = await open_sandbox("docker", SPEC)
        await sandbox.start(Command("sleep 1000"))
        # As the kernel does for a process that was killed.
        sandbox._line._writer.transport.abort()
        async with asyncio.timeout(10):
            while fake.containers:
                await asyncio.sleep(0.01)
        await sandbox.close()

    run(tmp_path, monkeypatch, act)


@needs_bwrap
def test_mounts_go_into_volumes_where_the_engine_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "hello.sh").write_text("#!/bin/sh\necho from the volume\n")
    (program / "hello.sh").chmod(0o755)
    spec = SandboxSpec(SPEC.limits, mounts=(Mount(program, PurePosixPath("/opt/agent")),), readonly_tests={"a": b"1"})
    monkeypatch.setattr(Address, "is_here", property(lambda self: False))
    os.chmod(tmp_path, 0o755)

    async def act(fake: FakeEngine) -> None:
        async with await open_sandbox("docker", spec) as sandbox:
            assert len(fake.volumes) == 2
            done = await sandbox.exec(Command("/opt/agent/hello.sh; cat /tests/a; touch /tests/b"), timeout=10)
            assert done.stdout == b"from the volume\n1"
            assert b"Read-only" in done.stderr
        assert (fake.volumes, fake.containers) == ({}, {})

    run(tmp_path, monkeypatch, act)


def test_an_image_without_python_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_DOCKER_IMAGE", "no-python:1")

    async def act(fake: FakeEngine) -> None:
        with pytest.raises(SandboxError, match="does not start") as caught:
            await open_sandbox("docker", SPEC)
        assert "PADDOCK_DOCKER_IMAGE" in str(caught.value.hint)
        assert fake.containers == {}

    run(tmp_path, monkeypatch, act, images=("no-python:1",))


def test_the_ledger_ends_containers_of_a_dead_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Owner(2**22 - 1, 1, Owner.current().boot_id, Owner.current().hostname, Owner.current().pid_namespace)

    async def act(fake: FakeEngine) -> None:
        async with Engine() as engine:
            for name in ("sb-dead", "sb-alive"):
                await engine.create({"Image": "x", "Labels": {"paddock.sandbox": name}, "HostConfig": {}})
            await engine.make_volume("left", {"paddock.sandbox": "sb-dead"})
        with_ledger = Store.open(tmp_path / "store")
        with_ledger.note_sandbox(SandboxEntry("sb-dead", "docker", owner=dead))
        found = await asyncio.to_thread(recover, with_ledger)
        with_ledger.close()
        assert (found.sandboxes, found.failed) == (["sb-dead"], {})
        assert [one.body["Labels"]["paddock.sandbox"] for one in fake.containers.values()] == ["sb-alive"]
        assert fake.volumes == {}
        assert await end_marked("sb-alive")

    run(tmp_path, monkeypatch, act)


# -- the shipped suite ------------------------------------------------------------------------------------


@needs_bwrap
@pytest.mark.end_to_end
def test_the_backend_conforms_on_a_small_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fake: FakeEngine) -> None:
        results = await check_sandbox(lambda spec: open_sandbox("docker", spec))
        assert failed(results) == []
        assert {result.outcome for result in results} == {"passed"}
        assert fake.containers == {}

    async def main() -> None:
        async with engine(tmp_path, monkeypatch) as fake:
            await act(fake)

    asyncio.run(main())


def no_engine() -> str | None:
    """Why there is no real engine to test with; None if there is one."""

    async def ask() -> None:
        async with asyncio.timeout(5), Engine():
            pass

    try:
        asyncio.run(ask())
    except (SandboxError, TimeoutError) as error:
        return str(error) or "it does not answer"
    return None


@pytest.mark.end_to_end
def test_the_backend_conforms_on_a_real_engine() -> None:
    if (reason := no_engine()) is not None:
        pytest.skip(f"NOT TESTED on a real engine: {reason}")
    results = asyncio.run(check_sandbox(lambda spec: open_sandbox("docker", spec, timeout=300)))
    assert failed(results) == []
