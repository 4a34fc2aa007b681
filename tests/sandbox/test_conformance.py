"""Both backends, as the shipped suite sees them, and both event loops."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from paddock.config import PADDOCK_IMAGES
from paddock.testing.conformance import failed
from paddock.testing.sandbox import check_sandbox
from sandbox.image_roots import make_image
from sandbox.places import needs_bwrap, opened


@needs_bwrap
def test_bubblewrap_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
    image = make_image(tmp_path)
    results = uvloop.run(check_sandbox(lambda spec: opened("bwrap", spec), image=image))
    assert failed(results) == []
    assert {result.outcome for result in results} == {"passed"}


def test_plain_processes_conform_but_do_not_isolate() -> None:
    results = asyncio.run(check_sandbox(lambda spec: opened("process", spec)))
    assert failed(results) == []
    skipped = [result for result in results if result.outcome == "skipped"]
    assert {result.detail for result in skipped} == {"this backend does not isolate", "this backend opens no images"}


def test_a_backend_that_cannot_be_opened_is_not_examined() -> None:
    async def refuse(_: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        asyncio.run(check_sandbox(refuse))  # type: ignore[arg-type]
