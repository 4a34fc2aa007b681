"""Virtual environments of the peers Paddock is measured against, completed when something is missing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"

HAS_PINS = """
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    pins = dict(pin.split("==") for pin in sys.argv[1:])
    sys.exit(any(version(name) != pinned for name, pinned in pins.items()))
except PackageNotFoundError:
    sys.exit(1)
"""


def ensure_peer(name: str) -> Path:
    """Return the Python of the peer's virtual environment, installing what it lacks.

    What belongs there is pinned in `bench/requirements/NAME.txt`. Others may have made the
    environment and put more or less into it: what is missing is added, nothing is taken away.

    Raises:
        subprocess.CalledProcessError: the environment could not be made.
    """
    home = PEERS / name
    python = home / "bin" / "python"
    requirements = REQUIREMENTS / f"{name}.txt"
    if not _is_complete(python, requirements.read_text().split()):
        print(f"installing {name} into .peers/{name} ...", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", str(home))
        _run(str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements))
    return python


def _is_complete(python: Path, pins: list[str]) -> bool:
    return python.exists() and subprocess.run([python, "-c", HAS_PINS, *pins], check=False).returncode == 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)
