"""Other people's packages that Paddock is tested and measured against, each in its own virtual environment.

They cannot be installed together: their pins contradict each other. An environment that is missing,
half-made or made from another recipe is built on first use; that takes a minute and needs a package index.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PEERS = REPOSITORY / ".peers"

REQUIREMENTS = {
    "openenv": ["openenv==0.10.0", "uvloop==0.23.0", "orjson==3.13.0", "picows==2.3.1"],
    "mcp1": ["mcp==1.30.0"],
    "mcp2": ["mcp==2.3.0"],
    "fastmcp": ["fastmcp==4.1.2"],
    "fleet": ["fleet-python==0.2.133", "mcp==1.24.0"],
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
    print(f"building .peers/{root.name} with {' '.join(requirements)} …", file=sys.stderr, flush=True)
    if root.is_symlink():
        root.unlink()
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    install = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements]
    subprocess.run(install, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    for peer in sys.argv[1:] or REQUIREMENTS:
        peer_python(peer)
