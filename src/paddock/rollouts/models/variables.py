"""The environment variables that models are found with, read in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ModelVariables:
    api_key: str | None = field(default=None, repr=False)
    """`PADDOCK_MODEL_API_KEY`: for whatever endpoint the user names."""
    openai_api_key: str | None = field(default=None, repr=False)
    """`OPENAI_API_KEY`: for endpoints on this machine and those that speak TLS."""
    hf_token: str | None = field(default=None, repr=False)
    """`HF_TOKEN`."""
    cache: Path = field(default_factory=Path)
    """Where fetched weights are kept: `paddock/models` below `XDG_CACHE_HOME` or `~/.cache`."""


def read_model_variables(environ: Mapping[str, str] | None = None) -> ModelVariables:
    source = os.environ if environ is None else environ
    home = source.get("HOME")
    cache = source.get("XDG_CACHE_HOME") or (Path(home) / ".cache" if home else Path("~/.cache").expanduser())
    return ModelVariables(
        api_key=source.get("PADDOCK_MODEL_API_KEY") or None,
        openai_api_key=source.get("OPENAI_API_KEY") or None,
        hf_token=source.get("HF_TOKEN") or None,
        cache=Path(cache) / "paddock" / "models",
    )
