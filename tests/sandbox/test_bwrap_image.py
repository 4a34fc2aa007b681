"""Sandboxes whose root is an image, with a range of ids and with a single one."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.config import PADDOCK_IMAGES
from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.sandbox import Command, SandboxSpec, bwrap_image
from paddock.sandbox.base import Mount
from paddock.sandbox.image_root import find_skeleton
from paddock.sandbox.images import store
from paddock.sandbox.images.image import Image
from paddock.sandbox.user_namespace import NOBODY, Identity, IdRange, find_identity
from sandbox.image_roots import make_image
from sandbox.places import needs_bwrap, opened, wait_until

pytestmark = needs_bwrap
LIMITS = SandboxLimits(disk_bytes=32 * MEBIBYTE)
OWN = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
SINGLE = Identity("single", (IdRange(0, OWN[0], 1),), (IdRange(0, OWN[1], 1),), "chosen by the test")
Use = Callable[[Any], Awaitable[Any]]


@pytest.fixture(params=["range", "single"])
def identity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Identity:
    chosen = SINGLE if request.param == "single" else find_identity()
    if chosen.kind != request.param:
        pytest.skip(chosen.reason)
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
    monkeypatch.setattr(store, "find_identity", lambda: chosen)
    monkeypatch.setattr(bwrap_image, "find_identity", lambda: chosen)
    return chosen


@pytest.fixture
def image(identity: Identity, tmp_path: Path) -> Image:
    return make_image(tmp_path, env={"COLOUR": "blue"}, workdir=PurePosixPath("/srv/work"))


def use(spec: SandboxSpec, act: Use) -> Any:
    async def scenario() -> Any:
        async with await opened("bwrap", spec) as sandbox:
            return await act(sandbox)

    return asyncio.run(scenario())


def run(spec: SandboxSpec, script: str, **options: Any) -> str:
    async def act(sandbox: Any) -> str:
        done = await sandbox.exec(Command(script, **options), timeout=20)
        return (done.stdout + done.stderr).decode().strip()

    return str(use(spec, act))


def test_the_root_is_the_image_and_the_user_is_root(image: Image) -> None:
    script = "id -u; pwd; echo $COLOUR $HOME; ls /; touch /new && cat /etc/hosts"
    lines = run(SandboxSpec(LIMITS, image=image), script).splitlines()
    assert lines[:3] == ["0", "/srv/work", "blue /root"]
    assert lines[-2:] == ["127.0.0.1 localhost sandbox", "::1 localhost"]
    assert "usr" in lines or "lib" in lines
    assert "work" not in lines


def test_a_work_folder_that_cannot_be_made_is_named(identity: Identity, tmp_path: Path) -> None:
    image = make_image(tmp_path, workdir=PurePosixPath("/etc/passwd"))
    with pytest.raises(SandboxError, match="cannot have a folder /etc/passwd: File exists") as caught:
        run(SandboxSpec(LIMITS, image=image), "true")
    assert caught.value.hint


def test_sandboxes_with_the_same_mounts_share_a_skeleton(identity: Identity, tmp_path: Path) -> None:
    mounts = [Mount(tmp_path, PurePosixPath("/opt/tools"))]
    old = os.umask(0o077)
    try:
        first = find_skeleton(tmp_path / "skeletons", mounts, identity, {})
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (first, first / "opt/tools", first / "etc/hosts")] == [
        *(0o755, 0o755, 0o644)
    ]
    assert find_skeleton(tmp_path / "skeletons", mounts, identity, {}) == first
    assert find_skeleton(tmp_path / "skeletons", mounts, identity, {"program": b""}) != first
    assert len(list((tmp_path / "skeletons").iterdir())) == 2


def test_owners_change_or_pretend_to(image: Image, identity: Identity) -> None:
    output = run(SandboxSpec(LIMITS, image=image), "touch /f && chown 1000:50 /f && stat -c %u:%g /f")
    assert output == ("1000:50" if identity.kind == "range" else "0:0")


def test_a_command_can_have_a_user(image: Image, identity: Identity) -> None:
    spec = SandboxSpec(LIMITS, image=image)
    if identity.kind == "single":
        with pytest.raises(SandboxError, match="only one id"):
            run(spec, "id", user="bob")
        return
    assert run(spec, "id -u; id -G; echo $HOME; touch /x", user="bob").splitlines()[:3] == [
        "1000",
        "1000 50",
        "/home/bob",
    ]
    assert "user nobody: there is no such user" in run(spec, "id", user="nobody")
    assert run(replace(spec, image=replace(image, config=replace(image.config, user="33:34"))), "id -u; id -g") == (
        "33\n34"
    )


def test_no_user_namespace_and_no_device_can_be_made(image: Image) -> None:
    from paddock.sandbox.host_runtime import TARGET

    code = "import os,ctypes; print(ctypes.CDLL(None).unshare(0x10000000)); os.mknod('/d', 0o20666, 0x103)"
    output = run(SandboxSpec(LIMITS, image=image), f'{TARGET}/bin/python3 -c "{code}"')
    assert output.startswith("-1\n")
    assert "Operation not permitted" in output


def test_files_at_any_path_are_read_and_written(image: Image) -> None:
    async def act(sandbox: Any) -> None:
        await sandbox.write("/app/new/file", b"content", mode=0o755)
        assert await sandbox.read("/opt/link/new/file") == b"content"
        await sandbox.exec(Command("mkdir /shut; echo x > /shut/f; chmod 0 /shut/f /shut"), timeout=20)
        assert await sandbox.read("/shut/f") == b"x\n"
        archive = await sandbox.pack("/app", limit=MEBIBYTE)
        await sandbox.unpack("/other", archive)
        assert [entry.path for entry in await sandbox.list("/other")] == ["new", "new/file"]
        await sandbox.exec(Command("ln -s /proc /opt/p"), timeout=20)
        for path in ("/proc/1/environ", "/opt/p/self/environ", "/dev/null", "/app/../etc/passwd"):
            with pytest.raises((SandboxError, FileNotFoundError)):
                await sandbox.read(path)
        await sandbox.kill()
        assert await sandbox.read("/app/new/file") == b"content"

    use(SandboxSpec(LIMITS, image=image), act)


@pytest.mark.skipif(find_identity().kind == "single", reason="needs real owners")
def test_files_of_every_user_of_the_image_are_reached(image: Image) -> None:
    async def act(sandbox: Any) -> None:
        script = "cd /home/bob; mkdir own; echo own > own/f; chmod 600 own/f; chmod 700 own; chown -R 1000:1000 own"
        await sandbox.exec(Command(script), timeout=9)
        assert await sandbox.read("/home/bob/own/f") == b"own\n"
        await sandbox.write("/home/bob/own/f", b"new\n", mode=0o600)
        await sandbox.write("/home/bob/own/g", b"")
        assert [entry.path for entry in await sandbox.list("/home/bob")] == ["own", "own/f", "own/g"]
        await sandbox.unpack("/home/bob/own/copy", await sandbox.pack("/home/bob/own", limit=MEBIBYTE))
        with pytest.raises(FileNotFoundError, match="no such file in the sandbox"):
            await sandbox.read("/home/bob/own/missing")
        with pytest.raises(SandboxError, match="larger than 1 bytes"):
            await sandbox.read("/home/bob/own/f", limit=1)
        await sandbox.kill()
        assert await sandbox.read("/home/bob/own/copy/f") == b"new\n"

    use(SandboxSpec(LIMITS, image=image), act)


def test_a_writable_layer_is_stacked_on_the_image(image: Image, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    tmp_path.chmod(0o711)
    layer.chmod(0o755)
    spec = SandboxSpec(LIMITS, image=image, writable_layer=layer)
    run(spec, "echo one > /app/one; rm -r /home; mkdir /home; rm /etc/group")
    assert not Path(f"{layer}.work").exists()
    assert (layer / "app/one").read_text() == "one\n"
    assert not (layer / "etc/hosts").exists()
    again = replace(spec, writable_layer=None, extra_layers=(layer,))
    assert run(again, "cat /app/one; ls /home; ls /etc") == "one\nhostname\nhosts\npasswd\nresolv.conf" or (
        "apt" in run(again, "ls /etc")
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_too_much_written_ends_the_sandbox(image: Image, tmp_path: Path, on_disk: bool) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    tmp_path.chmod(0o711)

    async def act(sandbox: Any) -> str | None:
        script = "dd if=/dev/zero of=/a bs=1M count=20; dd if=/dev/zero of=/b bs=1M count=20; sleep 20"
        return (await sandbox.exec(Command(script), timeout=20)).killed_for  # type: ignore[no-any-return]

    assert use(SandboxSpec(LIMITS, image=image, writable_layer=layer if on_disk else None), act) == "disk"


def test_links_of_an_image_lead_no_mount_to_the_host(identity: Identity, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    victim.chmod(0o777)
    image = make_image(tmp_path)
    root = tmp_path / "root"
    for name in ("run", "proc", "dev", "tests"):
        (root / name).symlink_to(f"/oldroot{victim}")
    image = make_image(tmp_path)
    spec = SandboxSpec(LIMITS, image=image, readonly_tests={"test.sh": b"#!/bin/sh\necho tested"})
    assert run(spec, "/tests/test.sh") == "tested"
    assert os.listdir(victim) == []


def test_nothing_is_left_and_the_layers_are_free_again(image: Image, tmp_path: Path) -> None:
    async def act(sandbox: Any) -> Any:
        await sandbox.exec(Command("sleep 100 & true"), timeout=20)
        return sandbox

    paths = use(SandboxSpec(LIMITS, image=image, readonly_tests={"test.sh": b""}), act).host_paths
    assert [path.exists() for path in paths] == [False]
    opened_store = store.default_store()
    opened_store.remove("small")
    assert opened_store.prune().layers == 1


def test_a_cancelled_open_leaves_nothing(image: Image) -> None:
    async def scenario() -> None:
        for pause in (0, 0.005, 0.01, 0.015, 0.02):
            opening = asyncio.ensure_future(
                opened("bwrap", SandboxSpec(LIMITS, image=image), sandbox_id="sb-cancelled")
            )
            await asyncio.sleep(pause)
            opening.cancel()
            try:
                await (await opening).close()
            except asyncio.CancelledError:
                continue

    asyncio.run(scenario())
    wait_until(lambda: not Path("/tmp/paddock-sb-cancelled").exists(), 5)
    from paddock.processes import find_marked_processes

    assert find_marked_processes("sb-cancelled") == []


@pytest.mark.parametrize("backend", ["process"])
def test_a_backend_without_images_says_so(image: Image, backend: str) -> None:
    with pytest.raises(SandboxError, match="cannot open images"):
        asyncio.run(opened(backend, SandboxSpec(LIMITS, image=image)))
