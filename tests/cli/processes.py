"""The command as a person runs it: a process of its own, with its own folder."""

import os
import subprocess
import sys
from pathlib import Path


def paddock(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "paddock", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**environment, **variables},
        timeout=50,
        check=False,
    )
