"""The other people's packages we test against, each in its own virtual environment.

They cannot be installed together: their pins contradict each other. A missing or
half-made environment is built on first use; this takes minutes and needs an index.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = REPOSITORY / ".peers"

REQUIREMENTS = {
    "openenv": ["openenv==0.10.0"],
    "mcp1": ["mcp==1.30.0"],
    "mcp2": ["mcp==2.3.0"],
    "fastmcp": ["fastmcp==4.1.2"],
    "both": ["openenv==0.10.0", "--editable", str(REPOSITORY)],
}


def peer_python(name: str) -> Path:
    """The interpreter that has the peer installed, building its environment when there is none.

    Raises:
        subprocess.CalledProcessError: the environment could not be built.
    """
    root = PEERS / name
    ready = PEERS / f"{name}.ready"
    PEERS.mkdir(exist_ok=True)
    with (PEERS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != recipe(name):
            build(root, REQUIREMENTS[name])
            # Written last, so a build that was interrupted is never mistaken for a finished one.
            ready.write_text(recipe(name))
    return root / "bin" / "python"


def recipe(name: str) -> str:
    """What the environment is made from: it is rebuilt when this changes."""
    requirements = REQUIREMENTS[name]
    sources = (REPOSITORY / "pyproject.toml").read_text() if "--editable" in requirements else ""
    return "\n".join([*requirements, sources])


def build(root: Path, requirements: list[str]) -> None:
    print(f"building {root} with {' '.join(requirements)} …", file=sys.stderr)
    if root.exists():
        shutil.rmtree(root)
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    subprocess.run([root / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)
