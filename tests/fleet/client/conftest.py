from collections.abc import Iterator

import pytest

from paddock import retry
from paddock.fleet.client import leases


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are a tenth of what they would be."""
    monkeypatch.setattr(retry, "jitter", lambda low, high: low + (high - low) / 10)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves an instance that nobody will end."""
    yield
    held = leases.current()
    expected = [lease for lease in held.outstanding() if lease.instance_id is not None]
    left = [lease for lease in expected if lease.state != "ending"]
    for lease in held.outstanding():
        held.mark_gone(lease)
    assert left == []
