"""Containers on images of tasks, against the fake container runtime."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.config import PADDOCK_IMAGES
from paddock.errors import ImageError
from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.sandbox import Command, Mount, SandboxSpec, open_sandbox
from paddock.sandbox.container_api import ContainerApi, ContainerApiAddress
from paddock.sandbox.docker_images import DockerImages, load_from_store, pack_context
from paddock.sandbox.images.image import Image
from paddock.sandbox.images.provider import BuildRequest
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy
from paddock.tasks.settings import TaskImage
from paddock.tasks.task import Task
from paddock.testing.conformance import failed
from paddock.testing.task import TaskCheck
from sandbox.fake_container_runtime import FakeContainerRuntime
from sandbox.image_roots import make_image
from sandbox.places import needs_bwrap

pytestmark = needs_bwrap
LIMITS = SandboxLimits(disk_bytes=32 * MEBIBYTE, cpus=1)
Act = Callable[[FakeContainerRuntime], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of our own store, which has the image `small`."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def stored(folder: Path) -> Image:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PADDOCK_IMAGES.name, str(folder / "store"))
        return make_image(folder, env={"COLOUR": "blue"}, workdir=PurePosixPath("/srv/work"))


@pytest.fixture
def image(folder: Path, stored: Image, monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(folder / "store"))
    return stored


@pytest.fixture
def run(tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Acts while a container runtime runs, which has the image `small` too."""

    def run(act: Act, **options: Any) -> Any:
        async def main() -> Any:
            async with asyncio.timeout(60), FakeContainerRuntime(tmp_path, **options) as fake:
                fake.images["small:latest"] = image
                monkeypatch.setenv("DOCKER_HOST", f"unix://{fake.path}")
                return await act(fake)

        return asyncio.run(main())

    return run


def build(dockerfile: str, files: dict[str, bytes] | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"network": NetworkPolicy("public"), "timeout": 60, **options}
    return DockerImages().build(BuildRequest(dockerfile=dockerfile, files=files or {}, **settings))


async def output(sandbox: Any, script: str, **options: Any) -> str:
    done = await sandbox.exec(Command(script, **options), timeout=20)
    return (done.stdout + done.stderr).decode().strip()


def test_an_image_of_our_store_is_loaded_and_opened(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        del fake.images["small:latest"]
        engine_image = await DockerImages().get("small")
        assert ("POST", "/v1.47/images/load") in fake.requests
        async with await open_sandbox("docker", SandboxSpec(LIMITS, image=engine_image, env={"A": "1"})) as sandbox:
            lines = (await output(sandbox, "id -u; pwd; echo $COLOUR $HOME $A; touch /new && ls /new")).splitlines()
            assert lines == ["0", "/srv/work", "blue /root 1", "/new"]
            await sandbox.write("/opt/link/made", b"1")
            assert (await sandbox.read("/app/made"), sandbox.workdir) == (b"1", PurePosixPath("/srv/work"))
            body = next(iter(fake.containers.values())).body
        assert fake.containers == {}
        assert (body["User"], body["HostConfig"]["NetworkMode"], body["NetworkDisabled"]) == ("0:0", "none", True)
        assert "SETUID" in body["HostConfig"]["CapAdd"]
        assert "ReadonlyRootfs" not in body["HostConfig"]

    run(act)


def test_an_image_of_the_engine_comes_before_our_own(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        fake.images["small:latest"] = replace(image, digest="sha256:" + "1" * 64)
        assert (await DockerImages().get("small")).digest == "sha256:" + "1" * 64

    run(act)


def test_an_image_that_cannot_be_pulled_is_a_task_error(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        with pytest.raises(ImageError, match="pull access denied"):
            await DockerImages().get("private/image:1")

    run(act)


def test_an_image_for_another_machine_is_refused(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        fake.images["foreign"] = replace(image, platform="linux/s390x")
        with pytest.raises(ImageError, match=r"for linux/s390x"):
            await DockerImages().get("foreign")

    run(act)


def test_a_dockerfile_is_built_by_the_engine(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        events: list[Any] = []
        text = "FROM small\nCOPY data /app/data\nRUN echo built\n"
        files = {"data": b"42", "left": b"out", ".dockerignore": b"left"}
        made = await build(text, files, on_progress=events.append)
        assert [(event.kind, event.step) for event in events if event.kind != "output"][:2] == [
            ("started", 1),
            ("done", 1),
        ]
        assert "built\n" in [event.text for event in events]
        async with await open_sandbox("docker", SandboxSpec(LIMITS, image=made)) as sandbox:
            assert await output(sandbox, "cat /app/data") == "42"
        assert "version" not in fake.builds[0]
        heredoc = await build("FROM small\nRUN <<EOF\necho 1 > /app/one\nEOF\n", network=NO_NETWORK)
        assert (fake.builds[1]["version"], fake.builds[1]["networkmode"]) == ("2", "none")
        assert heredoc.digest != made.digest

    run(act)


def test_a_failed_build_shows_its_last_output(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        with pytest.raises(ImageError, match="its last output: the reason"):
            await build("FROM small\nRUN echo the reason; exit 3\n")

    run(act)


def test_a_build_with_a_list_of_hosts_is_refused(run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        with pytest.raises(ImageError, match="allowlist") as caught:
            await build("FROM small", network=NetworkPolicy("allowlist", ("example.org",)))
        assert "bwrap" in (caught.value.hint or "")
        assert fake.builds == []

    run(act)


def test_the_context_is_packed_without_what_is_ignored() -> None:
    files = {"a": b"1", "b": b"2", ".dockerignore": b"b"}
    assert pack_context("FROM x", files, {}) == pack_context("FROM x", {**files, "b": b"3"}, {})
    assert pack_context("FROM x", files, {}) != pack_context("FROM x", {**files, "a": b"3"}, {})


def test_the_record_says_which_limits_the_engine_enforces(image: Image, run: Any) -> None:
    async def limits(fake: FakeContainerRuntime) -> dict[str, str]:
        spec = SandboxSpec(LIMITS, image=await DockerImages().get("small"))
        async with await open_sandbox("docker", spec) as sandbox:
            return dict(sandbox.limits_enforced)

    weak = run(limits, warnings=("Your kernel does not support memory limit capabilities.",))
    assert weak["memory"] == "measured every 0.25 s"
    assert weak["disk"].startswith("measured")
    strong = run(limits, limits_layers=True)
    assert (strong["memory"], strong["disk"]) == ("by the runtime, measured every 0.25 s", "by the runtime")


def test_a_container_that_writes_too_much_is_ended(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        spec = SandboxSpec(LIMITS, image=await DockerImages().get("small"))
        async with await open_sandbox("docker", spec) as sandbox:
            script = "for n in 1 2; do dd if=/dev/zero of=/$n bs=1048576 count=20; done; sleep 100"
            done = await sandbox.exec(Command(script), timeout=20)
            assert (done.killed_for, done.exit_code) == ("disk", None)

    run(act)


def test_processes_end_and_the_container_goes_on(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        spec = SandboxSpec(LIMITS, image=await DockerImages().get("small"))
        async with await open_sandbox("docker", spec) as sandbox:
            await output(sandbox, "(while :; do sleep 1; done) > /dev/null 2>&1 & echo 1 > /app/one")
            assert len(await sandbox.list_processes()) > 0
            await sandbox.end_processes()
            assert await sandbox.list_processes() == []
            assert await output(sandbox, "cat /app/one") == "1"

    run(act)


def test_an_engine_elsewhere_gets_copies(image: Image, run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "hello.sh").write_text("#!/bin/sh\necho copied\n")
    (tool / "hello.sh").chmod(0o755)
    monkeypatch.setattr(ContainerApiAddress, "is_local", property(lambda self: False))

    async def act(fake: FakeContainerRuntime) -> None:
        mounts = (Mount(tool, PurePosixPath("/opt/tool")),)
        spec = SandboxSpec(LIMITS, image=await DockerImages().get("small"), mounts=mounts)
        async with await open_sandbox("docker", spec, timeout=60) as sandbox:
            assert next(iter(fake.containers.values())).body["HostConfig"]["Mounts"] == []
            assert await output(sandbox, "/opt/tool/hello.sh") == "copied"

    run(act)


def test_only_a_stored_image_is_loaded(image: Image, run: Any) -> None:
    async def act(fake: FakeContainerRuntime) -> None:
        async with ContainerApi() as api:
            assert await load_from_store(api, "nothing/here:1") is False

    run(act)


def test_a_task_is_solved_and_scored_in_one_container(image: Image, run: Any) -> None:
    script = b"#!/bin/sh\nif [ -e /app/done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    task = Task(
        id="done",
        instruction="Make /app/done.",
        image=TaskImage(dockerfile="FROM small\nRUN echo 1 > /app/built\n"),
        tests={"test.sh": script},
        solution={"solve.sh": b"#!/bin/sh\ncat /app/built > /app/done\n"},
    )

    async def act(fake: FakeContainerRuntime) -> None:
        results = await TaskCheck(task, backend="docker").run()
        assert failed(results) == []
        assert [result.detail for result in results][-2:] == ["reward 0 (sealed)", "reward 1 (sealed)"]
        assert fake.containers == {}

    run(act)
