"""Images that were imported on the driver reach a node that has another store."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddock.config import PADDOCK_IMAGES
from paddock.sandbox.images.image import Image, ImageConfig
from paddock.sandbox.images.importing import import_root
from paddock.sandbox.images.store import ImageStore
from paddock.scale.driver_images import DIGEST_LABEL, fetch_driver_images, image_names
from paddock.scale.rollout_service import RolloutService
from paddock.tasks.settings import TaskImage
from paddock.tasks.task import Task

NAMED = Task(id="a", instruction="b", image=TaskImage("mine:1"))


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """In the store of the driver."""
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "driver"))
    return imported(tmp_path, b"first")


def imported(folder: Path, content: bytes) -> Image:
    root = folder / "root"
    root.mkdir(exist_ok=True)
    (root / "file").write_bytes(content)
    return import_root(root, "mine:1", ImageConfig(env={"A": "1"}), ImageStore(folder / "driver"))


def fetch(task: Task, node: ImageStore) -> Any:
    async def main() -> None:
        async with asyncio.timeout(30), RolloutService("127.0.0.1") as service:
            ticket = service.ticket("r1")
            # Several rollouts at a time: the image is imported once.
            await asyncio.gather(*(fetch_driver_images(task, ticket, store=node) for _ in range(2)))

    asyncio.run(main())


def content(store: ImageStore) -> bytes:
    image = store.find("mine:1")
    assert image is not None
    with store.hold(image) as layers:
        return (layers[-1] / "file").read_bytes()


def test_an_imported_image_is_fetched_once_and_replaced_by_a_new_one(image: Image, tmp_path: Path) -> None:
    node = ImageStore(tmp_path / "node")
    fetch(NAMED, node)
    stored = node.find_stored("mine:1")
    assert stored is not None
    assert (stored.source, stored.image.config.env, content(node)) == ("registry", {"A": "1"}, b"first")
    assert stored.image.config.labels[DIGEST_LABEL] == image.digest
    fetch(NAMED, node)
    again = node.find_stored("mine:1")
    assert again is not None
    assert again.saved_at == stored.saved_at
    imported(tmp_path, b"second")
    fetch(replace(NAMED, image=TaskImage(dockerfile="FROM mine:1\nRUN true\n")), node)
    assert content(node) == b"second"


def test_what_was_not_imported_is_left_to_the_node(image: Image, tmp_path: Path) -> None:
    ImageStore(tmp_path / "driver").save(image, source="registry")
    node = ImageStore(tmp_path / "node")
    fetch(NAMED, node)
    assert node.find("mine:1") is None


def test_names_of_a_dockerfile_are_those_it_starts_from() -> None:
    text = "FROM one AS base\nFROM base\nFROM two:2\n"
    assert {"one", "two:2"} <= set(image_names(replace(NAMED, image=TaskImage(dockerfile=text))))
