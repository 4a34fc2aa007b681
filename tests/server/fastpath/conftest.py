import pytest

from paddock.config import PADDOCK_FASTPATH


@pytest.fixture(autouse=True)
def _skip_without_fastpath() -> None:
    if not PADDOCK_FASTPATH.read():
        pytest.skip("PADDOCK_FASTPATH=0")
