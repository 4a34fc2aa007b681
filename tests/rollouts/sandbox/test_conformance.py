"""Both backends, as the shipped suite sees them."""

import asyncio

import pytest
import uvloop

from paddock.testing.conformance import failed
from paddock.testing.sandbox import check_sandbox
from rollouts.sandbox.places import both, needs_bwrap, opened


@both
def test_a_backend_conforms(backend: str) -> None:
    results = asyncio.run(check_sandbox(lambda spec: opened(backend, spec)))
    assert failed(results) == []
    skipped = [result for result in results if result.outcome == "skipped"]
    assert bool(skipped) == (backend == "process")


@needs_bwrap
def test_it_conforms_on_uvloop() -> None:
    assert failed(uvloop.run(check_sandbox(lambda spec: opened("bwrap", spec)))) == []


def test_a_backend_that_cannot_be_opened_is_not_examined() -> None:
    async def refuse(_: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        asyncio.run(check_sandbox(refuse))  # type: ignore[arg-type]
