"""The docker backend: its wire against a fake container runtime, and a real one where one answers."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.config import PADDOCK_IMAGES
from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.rollouts.sandboxes import recover
from paddock.sandbox import Command, Mount, SandboxSpec, open_sandbox
from paddock.sandbox.container_api import (
    AttachedChannel,
    ContainerApi,
    ContainerApiAddress,
    ContainerApiError,
    find_address,
)
from paddock.sandbox.docker import DockerSandbox, end_labelled
from paddock.sandbox.docker_images import DockerImages
from paddock.store import Owner, SandboxEntry, Store
from paddock.testing.conformance import failed
from paddock.testing.sandbox import check_sandbox
from sandbox.fake_container_runtime import FakeContainerRuntime
from sandbox.image_roots import make_image
from sandbox.places import needs_bwrap

SPEC = SandboxSpec(SandboxLimits(disk_bytes=32 * MEBIBYTE, processes=100, cpus=1))


@asynccontextmanager
async def container_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[FakeContainerRuntime]:
    async with FakeContainerRuntime(folder, **options) as fake:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{fake.path}")
        yield fake


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[FakeContainerRuntime], Any], **options: Any
) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(30), container_runtime(folder, monkeypatch, **options) as fake:
            return await act(fake)

    return asyncio.run(main())


# -- where the runtime listens -----------------------------------------------------------------------------


def test_the_address_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_TLS_VERIFY", raising=False)
    assert find_address() == ContainerApiAddress("/var/run/docker.sock")
    assert find_address("unix:///run/podman/podman.sock").path == "/run/podman/podman.sock"
    elsewhere = find_address("tcp://engine.example:2375")
    assert (elsewhere.is_local, elsewhere.base) == (False, "http://engine.example:2375")
    with pytest.raises(SandboxError, match="cannot be reached"):
        find_address("ssh://me@engine")


def test_certificates_are_needed_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="certificates"):
        find_address("tcp://engine.example")


def test_a_missing_container_runtime_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(SandboxError, match="no container runtime answers") as caught:
        asyncio.run(open_sandbox("docker", SPEC))
    assert "DOCKER_HOST" in str(caught.value.hint)


# -- its wire ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "agreed"), [("1.51", "1.47"), ("1.44", "1.44")])
def test_a_version_is_agreed_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, agreed: str) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        async with ContainerApi() as api:
            assert (api.version, api.name) == (agreed, "Fake/1")
            assert await api.find_containers("paddock.sandbox=none") == []
        assert fake.requests[-1] == ("GET", f"/v{agreed}/containers/json")

    run(tmp_path, monkeypatch, act, version=theirs)


def test_a_container_runtime_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: FakeContainerRuntime) -> None:
        with pytest.raises(ContainerApiError, match=r"implements API 1\.24"):
            await ContainerApi().__aenter__()

    run(tmp_path, monkeypatch, act, version="1.24")


def test_a_refusal_of_the_container_runtime_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: FakeContainerRuntime) -> None:
        async with ContainerApi() as api:
            with pytest.raises(ContainerApiError, match="No such container: containers/none/start") as caught:
                await api.start("none")
            assert caught.value.status == 404
            with pytest.raises(ContainerApiError, match="does not attach"):
                await api.attach("none")
            await api.remove("none")

    run(tmp_path, monkeypatch, act)


def test_a_missing_image_is_pulled_and_a_failed_pull_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        async with ContainerApi() as api:
            await api.pull_image("registry.example:5000/some/image")
            assert "registry.example:5000/some/image:latest" in fake.images
            with pytest.raises(ContainerApiError, match="unexpected EOF"):
                await api.pull_image("broken:1")
            with pytest.raises(ContainerApiError, match="pull access denied"):
                await api.pull_image("private/image:2")

    run(tmp_path, monkeypatch, act)


def test_outputs_are_taken_apart_however_they_are_cut() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        channel = AttachedChannel(reader, None)  # type: ignore[arg-type]
        frames = b"".join(
            struct.pack(">BxxxI", kind, len(data)) + data
            for kind, data in ((2, b"complaint"), (1, b""), (1, b"first"), (1, b"second"))
        )
        feeding = asyncio.ensure_future(feed(reader, frames))
        assert [await channel.receive() for _ in range(3)] == [b"first", b"second", b""]
        assert bytes(channel.stderr) == b"complaint"
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
        with pytest.raises(SandboxError, match="unknown kind of frame"):
            await AttachedChannel(reader, None).receive()  # type: ignore[arg-type]

    asyncio.run(main())


# -- sandboxes --------------------------------------------------------------------------------------------


def test_a_container_is_described_with_all_its_limits() -> None:
    spec = SandboxSpec(SPEC.limits, mounts=(Mount(Path("/opt/x"), PurePosixPath("/opt/agent")),))
    config = DockerSandbox("sb-1", spec)._container_config(["/opt/x"])
    host = config["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["AutoRemove"]) == ("none", True, True)
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert (host["PidsLimit"], host["NanoCpus"], host["Memory"]) == (101, 10**9, host["MemorySwap"])
    assert host["Memory"] > SPEC.limits.memory_bytes
    sizes = [int(options.rpartition("=")[2]) for options in host["Tmpfs"].values()]
    assert sum(sizes) + host["ShmSize"] == SPEC.limits.disk_bytes
    assert host["Mounts"] == [{"Type": "bind", "Source": "/opt/x", "Target": "/opt/agent", "ReadOnly": True}]
    assert config["Labels"]["paddock.sandbox"] == "sb-1"
    assert config["User"] == "1000:1000"


@needs_bwrap
def test_a_container_runs_commands_and_is_gone_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        async with await open_sandbox("docker", SPEC) as sandbox:
            assert len(fake.containers) == 1
            done = await sandbox.exec(Command("cat; echo wrong >&2; exit 3", stdin=b"given"), timeout=10)
            assert (done.exit_code, done.stdout, done.stderr) == (3, b"given", b"wrong\n")
        assert fake.containers == {}

    run(tmp_path, monkeypatch, act)


@needs_bwrap
def test_a_container_whose_owner_is_gone_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        sandbox: Any = await open_sandbox("docker", SPEC)
        await sandbox.start(Command("sleep 1000"))
        # As the kernel does for a process that was killed.
        sandbox._channel._writer.transport.abort()
        async with asyncio.timeout(10):
            while fake.containers:
                await asyncio.sleep(0.01)
        await sandbox.close()

    run(tmp_path, monkeypatch, act)


@needs_bwrap
def test_mounts_go_into_volumes_where_the_container_runtime_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "hello.sh").write_text("#!/bin/sh\necho from the volume\n")
    (program / "hello.sh").chmod(0o755)
    spec = SandboxSpec(SPEC.limits, mounts=(Mount(program, PurePosixPath("/opt/agent")),), readonly_tests={"a": b"1"})
    monkeypatch.setattr(ContainerApiAddress, "is_local", property(lambda self: False))
    os.chmod(tmp_path, 0o755)

    async def act(fake: FakeContainerRuntime) -> None:
        async with await open_sandbox("docker", spec) as sandbox:
            assert len(fake.volumes) == 2
            done = await sandbox.exec(Command("/opt/agent/hello.sh; cat /tests/a; touch /tests/b"), timeout=10)
            assert done.stdout == b"from the volume\n1"
            assert b"Read-only" in done.stderr
        assert (fake.volumes, fake.containers) == ({}, {})

    run(tmp_path, monkeypatch, act)


def test_an_image_without_python_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_DOCKER_IMAGE", "no-python:1")

    async def act(fake: FakeContainerRuntime) -> None:
        with pytest.raises(SandboxError, match="does not start") as caught:
            await open_sandbox("docker", SPEC)
        assert "PADDOCK_DOCKER_IMAGE" in str(caught.value.hint)
        assert fake.containers == {}

    run(tmp_path, monkeypatch, act, images=("no-python:1",))


def test_the_ledger_ends_containers_of_a_dead_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Owner(2**22 - 1, 1, Owner.current().boot_id, Owner.current().hostname, Owner.current().pid_namespace)

    async def act(fake: FakeContainerRuntime) -> None:
        async with ContainerApi() as api:
            for name in ("sb-dead", "sb-alive"):
                await api.create({"Image": "x", "Labels": {"paddock.sandbox": name}, "HostConfig": {}})
            await api.create_volume("left", {"paddock.sandbox": "sb-dead"})
        with_ledger = Store.open(tmp_path / "store")
        with_ledger.record_sandbox(SandboxEntry("sb-dead", "docker", owner=dead))
        recovery = await asyncio.to_thread(recover, with_ledger)
        with_ledger.close()
        assert (recovery.sandboxes, recovery.failed) == (["sb-dead"], {})
        assert [one.body["Labels"]["paddock.sandbox"] for one in fake.containers.values()] == ["sb-alive"]
        assert fake.volumes == {}
        assert await end_labelled("sb-alive")

    run(tmp_path, monkeypatch, act)


# -- the shipped suite ------------------------------------------------------------------------------------


@needs_bwrap
@pytest.mark.end_to_end
def test_the_backend_conforms_on_a_small_container_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        fake.images["small:latest"] = make_image(tmp_path)
        image = await DockerImages().get("small")
        results = await check_sandbox(lambda spec: open_sandbox("docker", spec), image=image)
        assert failed(results) == []
        assert {result.outcome for result in results} == {"passed"}
        assert fake.containers == {}

    async def main() -> None:
        monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
        async with container_runtime(tmp_path, monkeypatch) as fake:
            await act(fake)

    asyncio.run(main())


def missing_container_runtime() -> str | None:
    """Why there is no real container runtime to test with; None if there is one."""

    async def ask() -> None:
        async with asyncio.timeout(5), ContainerApi():
            pass

    try:
        asyncio.run(ask())
    except (SandboxError, TimeoutError) as error:
        return str(error) or "it does not answer"
    return None


@pytest.mark.end_to_end
def test_the_backend_conforms_on_a_real_container_runtime() -> None:
    if (reason := missing_container_runtime()) is not None:
        pytest.skip(f"NOT TESTED on a real container runtime: {reason}")
    results = asyncio.run(check_sandbox(lambda spec: open_sandbox("docker", spec, timeout=300)))
    assert failed(results) == []
