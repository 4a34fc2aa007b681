"""No test leaves a process behind for the next one to find."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_warden_is_left() -> Iterator[None]:
    yield
    verifying = sys.modules.get("paddock.fleet.instance.verifying")
    if verifying is not None:
        verifying.close_default_verifiers()
