"""Every shipped agent on a root with one static program: no libc, no bash, no Python, no Node.js, no certificates."""

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import pytest

from paddock.agents import AGENTS, find_agent, load_agent
from paddock.capture.upstream import Upstream
from paddock.config import PADDOCK_IMAGES
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts import sandbox_scene
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import RunContext
from paddock.rollouts.rollout import Rollout
from paddock.sandbox import bwrap_image
from paddock.sandbox.base import SandboxSpec
from paddock.sandbox.images import store as images_store
from paddock.sandbox.images.image import Image, ImageConfig
from paddock.sandbox.images.importing import import_root
from paddock.sandbox.images.store import default_store
from paddock.sandbox.user_namespace import NOBODY, Identity, IdRange, find_identity
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.task import Task
from paddock.testing.agents import tool_turn
from rollouts.played import needs_bwrap

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120), needs_bwrap]

SHIPPED = [name for name in AGENTS if find_agent(name).tools is not None]
TIMEOUTS = RolloutTimeouts(agent=90, verifier=30, model_call=60)
LOOK = "cp answer.txt copy.txt; env > environment.txt; ls -A /root > home.txt"
PASSWD = """root:x:0:0:root:/root:/bin/sh
bob:x:1000:1000::/home/bob:/bin/sh
nobody:x:65534:65534::/nonexistent:/bin/sh
"""
CONFIGURATION = {".paddock", ".config", ".local", ".cache"}
"""Where agents put their settings and caches in the home of root, and nowhere else."""


def find_busybox(folder: Path) -> Path:
    """A static busybox: the one of this machine, or the one of Debian's package."""
    on_path = shutil.which("busybox")
    if on_path is not None and b"ld-linux" not in Path(on_path).read_bytes():
        return Path(on_path)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("there is no static busybox, and no apt to fetch it")
    fetched = subprocess.run(
        ["apt-get", "download", "-q", "busybox-static"], cwd=folder, capture_output=True, timeout=60, check=False
    )
    if fetched.returncode != 0:
        pytest.skip(f"busybox-static cannot be fetched: {fetched.stderr.decode()[-200:]}")
    (archive,) = folder.glob("busybox-static*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder], timeout=60, check=True)
    return next(path for path in (folder / "bin/busybox", folder / "usr/bin/busybox") if path.exists())


@pytest.fixture(scope="module")
def busybox_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name in ("bin", "etc", "app", "home/bob"):
        (root / name).mkdir(parents=True)
    (root / "app").chmod(0o777)
    program = root / "bin" / "busybox"
    shutil.copy(find_busybox(tmp_path_factory.mktemp("package")), program)
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, timeout=20, check=True).stdout
    for name in set(applets.split()) - {"busybox", "bash"}:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text(PASSWD)
    if os.geteuid() == 0:
        os.chown(root / "home/bob", 1000, 1000)
    return root


@pytest.fixture
def single_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where no range of ids is set up for the user."""
    own = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    single = Identity("single", (IdRange(0, own[0], 1),), (IdRange(0, own[1], 1),), "chosen by the test")
    monkeypatch.setattr(images_store, "find_identity", lambda: single)
    monkeypatch.setattr(bwrap_image, "find_identity", lambda: single)


@pytest.fixture
def image(busybox_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
    image = import_root(busybox_root, "busybox", ImageConfig(workdir=PurePosixPath("/app")), default_store())
    monkeypatch.setattr(sandbox_scene, "SandboxSpec", partial(SandboxSpec, image=image))
    return image


@pytest.fixture
def image_user(image: Image, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses the user of the image."""

    def choose(user: str) -> None:
        changed = replace(image, config=replace(image.config, user=user))
        monkeypatch.setattr(sandbox_scene, "SandboxSpec", partial(SandboxSpec, image=changed))

    return choose


async def run_agent(name: str, driver: str, folder: Path) -> tuple[RolloutRecord, dict[str, str]]:
    """The record, and the files that the agent's commands left in the work folder."""
    agent = load_agent(name, driver=driver)
    assert agent.tools is not None
    end = {"text": "It is done."} if agent.tools.finish is None else tool_turn(agent.tools.finish)
    write = tool_turn(agent.tools.write("/app/answer.txt", "42"))
    script = {"turns": [write, tool_turn(agent.tools.run(LOOK)), end]}
    async with ReplayServer(script) as server, Upstream() as upstream:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        config = RunConfig(model=endpoint, agent=agent, timeouts=TIMEOUTS)
        with Store.open(folder) as store:
            context = RunContext.create(config, endpoint=endpoint, store=store, upstream=upstream)
            record = await Rollout(Task("Write 42 to answer.txt.", id="small"), context).run()
            assert record.workdir_blob is not None, record.error
            with tarfile.open(fileobj=io.BytesIO(store.get_blob(record.workdir_blob))) as archive:
                members = [member for member in archive if member.isfile()]
                return record, {
                    str(PurePosixPath(member.name)): file.read().decode()
                    for member in members
                    if (file := archive.extractfile(member)) is not None
                }


DRIVERS = [(name, driver) for name in SHIPPED for driver in find_agent(name).drivers]


@pytest.mark.parametrize(("name", "driver"), DRIVERS)
@pytest.mark.usefixtures("image")
def test_an_agent_works_on_a_root_that_has_only_a_shell(name: str, driver: str, tmp_path: Path) -> None:
    record, files = asyncio.run(run_agent(name, driver, tmp_path / "store"))
    assert (record.outcome, record.call_count) == (Outcome.OK, 3), f"{record.error}: {record.agent_log[-500:]}"
    assert (files.pop("answer.txt"), files.pop("copy.txt")) == ("42", "42")
    variables = [line.split("=")[0] for line in files.pop("environment.txt").splitlines()]
    assert "HOME" in variables
    assert [variable for variable in variables if variable.startswith(("LD_", "PYTHON", "NODE_"))] == []
    assert set(files.pop("home.txt").split()) <= CONFIGURATION
    assert files == {}


@pytest.mark.usefixtures("single_id", "image")
def test_an_agent_works_with_a_single_id(tmp_path: Path) -> None:
    record, files = asyncio.run(run_agent("pi", "run", tmp_path / "store"))
    assert (record.outcome, files["copy.txt"]) == (Outcome.OK, "42"), record.error


@pytest.mark.skipif(
    os.geteuid() != 0 or find_identity().kind == "single", reason="needs root here and a range of ids"
)
@pytest.mark.parametrize(("user", "home"), [("bob", "/home/bob"), ("nobody", "/home/paddock")])
def test_an_agent_works_as_another_user(
    user: str, home: str, image_user: Callable[[str], None], tmp_path: Path
) -> None:
    image_user(user)
    record, files = asyncio.run(run_agent("pi", "run", tmp_path / "store"))
    assert (record.outcome, files["copy.txt"]) == (Outcome.OK, "42"), f"{record.error}: {record.agent_log[-500:]}"
    assert f"HOME={home}" in files["environment.txt"].splitlines()
