"""Sandboxes on images at `paddock e2b up`, with E2B's real SDK and with the `e2b` backend."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.config import PADDOCK_IMAGES
from rollouts.played import needs_bwrap
from sandbox.image_roots import make_image

from .fronts import FrontProcess, front

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True), needs_bwrap]

SDK = """
import json
from e2b import Sandbox, NotFoundException, SandboxException, Template
seen = {"exists": [Template.exists("small"), Template.exists("127.0.0.1:1/none:1")]}
with Sandbox.create("small") as sandbox:
    seen["run"] = sandbox.commands.run("pwd; id -u; echo $COLOUR $HOME; ls /bin").stdout.splitlines()
    sandbox.files.write("/opt/new/file", "written")
    seen["root"] = sandbox.commands.run("cat /opt/new/file; id -u", user="root").stdout
    seen["read"] = sandbox.files.read("/opt/new/file")
try:
    Sandbox.create("127.0.0.1:1/none:1")
except SandboxException as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""
BACKEND = """
import asyncio, json
from pathlib import PurePosixPath
from paddock.errors import ImageError
from paddock.limits import SandboxLimits
from paddock.sandbox import Command, SandboxSpec, find_backend, open_sandbox

async def main():
    images = find_backend("e2b").image_provider()
    spec = SandboxSpec(SandboxLimits(disk_bytes=64 << 20), env={"A": "1"}, image=await images.get("small"))
    seen = {}
    async with await open_sandbox("e2b", spec) as sandbox:
        async def run(script):
            done = await sandbox.exec(Command(script), timeout=20)
            return (done.stdout + done.stderr).decode().split()
        seen["run"] = await run("pwd; id -u; echo $COLOUR $HOME $A; cat /proc/net/route")
        seen["workdir"] = str(sandbox.workdir)
        await sandbox.write("/app/file", b"1")
        await run("sleep 1000 > /dev/null 2>&1 &")
        await sandbox.end_processes()
        seen["after"] = [len(await sandbox.list_processes()), await run("cat /app/file")]
    try:
        await images.get("127.0.0.1:1/none:1")
    except ImageError as error:
        seen["missing"] = error.message
    print(json.dumps(seen))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    folder = tmp_path_factory.mktemp("front")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PADDOCK_IMAGES.name, str(folder / "images"))
        make_image(folder, env={"COLOUR": "blue"}, workdir=PurePosixPath("/srv/work"))
        with front(folder, "--max-sandboxes", "2") as running:
            yield running


def run(server: FrontProcess, script: str, folder: Path) -> Any:
    path = folder / "script.py"
    path.write_text(script)
    finished = server.run(path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


def test_a_template_is_the_image_of_that_name(server: FrontProcess, tmp_path: Path) -> None:
    seen = run(server, SDK, tmp_path)
    assert seen["exists"] == [True, False]
    assert seen["run"][:3] == ["/srv/work", "0", "blue /root"]
    assert "python3" not in seen["run"]
    assert (seen["root"], seen["read"]) == ("written0\n", "written")
    assert "not found" in seen["refused"]


def test_the_backend_opens_images_as_templates(server: FrontProcess, tmp_path: Path) -> None:
    seen = run(server, BACKEND, tmp_path)
    assert seen["run"][:5] == ["/srv/work", "0", "blue", "/root", "1"]
    assert (seen["workdir"], seen["after"]) == ("/srv/work", [0, ["1"]])
    assert "no template" in seen["missing"]
