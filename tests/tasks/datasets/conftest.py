from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of fetched task sets."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PADDOCK_TASKS", str(folder))
    monkeypatch.delenv("PADDOCK_TASK_REGISTRY", raising=False)
    return folder
