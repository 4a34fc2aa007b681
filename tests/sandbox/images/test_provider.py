"""The build context of a task: its files, with their modes and links."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from paddock.config import PADDOCK_IMAGES
from paddock.sandbox.docker_images import pack_context
from paddock.sandbox.images.provider import BuildRequest, StoreImages
from paddock.sandbox.images.store import ImageStore
from paddock.sandbox.network.policy import NO_NETWORK

FILES = {"a/link": b"../b.txt", "b.txt": b"b", "run": b"#!"}
MODES = {"a/link": 0o120000, "run": 0o755}


@pytest.mark.anyio
async def test_links_of_a_context_are_copied_as_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
    dockerfile = "FROM scratch\nCOPY . /all/\nCOPY a/link /followed\n"
    request = BuildRequest(dockerfile=dockerfile, files=FILES, modes=MODES, network=NO_NETWORK, timeout=60.0)
    image = await StoreImages().build(request)
    with ImageStore(tmp_path / "images").hold(image) as (first, second):
        assert os.readlink(first / "all" / "a" / "link") == "../b.txt"
        assert (first / "all" / "run").stat().st_mode & 0o777 == 0o755
        assert (second / "followed").read_bytes() == b"b"


def test_an_engine_gets_the_links_too() -> None:
    packed = pack_context("FROM scratch", FILES, MODES)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.getmember("a/link")
    assert (member.issym(), member.linkname) == (True, "../b.txt")
