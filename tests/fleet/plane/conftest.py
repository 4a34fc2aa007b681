from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .running_plane import RunningPlane, StartPlane, plane_settings


@pytest.fixture
def start_plane(tmp_path: Path) -> Iterator[StartPlane]:
    """Starts planes on one state folder, one after the other; ends them all."""
    running: list[RunningPlane] = []

    def start(verify: Any = None, loop: str = "uvloop", **changes: Any) -> RunningPlane:
        running.append(RunningPlane(plane_settings(tmp_path / "state", **changes), verify, loop))
        return running[-1]

    yield start
    for plane in running:
        if plane.thread.is_alive():
            plane.stop()


@pytest.fixture
def plane(start_plane: StartPlane) -> RunningPlane:
    return start_plane()
