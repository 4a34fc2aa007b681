"""Tasks with images on a real cluster of two nodes, each with an image store of its own."""

import asyncio
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.agents.command import CommandAgent
from paddock.config import PADDOCK_IMAGES
from paddock.rollouts.api import run_batch
from paddock.sandbox.images.store import ImageStore
from paddock.scale.driver_images import DIGEST_LABEL
from paddock.store.outcome import Outcome
from paddock.tasks.settings import TaskImage
from rollouts.played import NOBODY_THERE, a_task, needs_bwrap
from sandbox.image_roots import make_image

pytest.importorskip("ray")

from bench.ray_cluster import LocalCluster

from paddock.scale.cluster import Resources
from paddock.scale.rollouts import RayBackend

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.end_to_end,
    pytest.mark.timeout(150, func_only=True),
    pytest.mark.filterwarnings("default"),
    needs_bwrap,
]
TESTS = b'#!/bin/sh\nif [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


@dataclass
class Nodes:
    address: str
    stores: dict[str, ImageStore]
    """By the id of the node."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The path is short: it holds sockets. The image `small` is only in the store of the driver."""
    temporary = Path(tempfile.mkdtemp(prefix="pi-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        for name in ("TMPDIR", "RAY_TMPDIR"):
            patch.setenv(name, str(temporary))
        folders = [temporary / "first", temporary / "second"]
        patch.setenv(PADDOCK_IMAGES.name, str(folders[0]))
        with LocalCluster(1, cpus=2) as cluster:
            cluster.add_node(env_vars={PADDOCK_IMAGES.name: str(folders[1])})
            patch.setenv(PADDOCK_IMAGES.name, str(temporary / "driver"))
            make_image(temporary, workdir=PurePosixPath("/app"))
            ids = [node.node_id for node in cluster.nodes]
            yield Nodes(cluster.address, dict(zip(ids, map(ImageStore, folders), strict=True)))


def test_nodes_get_images_of_the_driver_and_build_on_them(nodes: Nodes, tmp_path: Path) -> None:
    agent = CommandAgent(shlex.join(["/bin/sh", "-c", "echo 42 > answer.txt"]))
    named = a_task("", id="named", tests={"test.sh": TESTS}, image=TaskImage("small"))
    text = "FROM small\nRUN echo built > /app/built\n"
    built = a_task("", id="built", tests={"test.sh": TESTS}, image=TaskImage(dockerfile=text))

    async def run() -> Any:
        engine = RayBackend(nodes.address, Resources(cpus=1), per_node=1)
        options: dict[str, Any] = {"engine": engine, "n": 2, "parallel": 2, "retries": 0}
        return await run_batch([named, built], model=NOBODY_THERE, agent=agent, store=tmp_path, **options)

    result = asyncio.run(asyncio.wait_for(run(), 140))
    records = result.records
    assert [(record.outcome, record.reward) for record in records] == [(Outcome.OK, 1.0)] * 4, [
        record.error for record in records
    ]
    used = {record.metadata["node"]["node"] for record in records}
    assert used <= set(nodes.stores)
    for node in used:
        image = nodes.stores[node].find("small")
        assert image is not None
        assert DIGEST_LABEL in image.config.labels
