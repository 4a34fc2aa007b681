"""Tasks that come with Paddock, as data: one folder each, in the layout that `paddock.rollouts` reads."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def shipped() -> dict[str, Path]:
    """The folder of each shipped task, by name."""
    return {folder.name: folder for folder in sorted(HERE.iterdir()) if (folder / "instruction.md").is_file()}


def replay_file() -> Path:
    """Recorded model answers with which an agent solves every shipped task, for runs without a model."""
    return HERE / "replay.json"
