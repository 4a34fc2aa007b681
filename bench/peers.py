"""Virtual environments of the peers Paddock is measured against, made when missing."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


def ensure_peer(name: str) -> Path:
    """Return the Python of the peer's virtual environment, installing the peer first if needed.

    What is installed is pinned in `bench/requirements/NAME.txt`. An installation that fails
    is removed again, so that the next call starts afresh.

    Raises:
        subprocess.CalledProcessError: the environment could not be made.
    """
    home = PEERS / name
    python = home / "bin" / "python"
    if python.exists():
        return python
    print(f"installing {name} into {home.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "-r",
                str(REQUIREMENTS / f"{name}.txt"),
            ],
            check=True,
            stdout=sys.stderr,
        )
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return python
