"""A store with rollouts of several kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from export.rollouts import conversation, forked, record, save
from paddock.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        aborted = conversation(1)
        aborted[0].aborted = True
        save(opened, record("r0", started_at=1.0), conversation(3))
        save(opened, record("r1", started_at=2.0, batch_id="b2"), forked())
        save(opened, record("r2", reward=None, reward_reason="it hung", started_at=3.0), conversation(2))
        save(opened, record("r3", outcome=None, started_at=4.0), conversation(2))
        save(opened, record("r4", reward=0.0, started_at=5.0), aborted)
        yield opened
