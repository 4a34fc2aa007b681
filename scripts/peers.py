"""Other people's packages that Paddock is tested and measured against, each in its own virtual environment.

They cannot be installed together: their pins contradict each other. An environment that is missing,
half-made or made from another recipe is built on first use, by uv: that takes seconds and needs a package index.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PEERS = REPOSITORY / ".peers"

REQUIREMENTS = {
    "openenv": ["openenv==0.10.0", "uvloop==0.23.0", "orjson==3.13.0", "picows==2.3.1"],
    "mcp1": ["mcp==1.30.0"],
    "mcp2": ["mcp==2.3.0"],
    "fastmcp": ["fastmcp==4.1.2"],
    "fleet": ["fleet-python==0.2.133", "mcp==1.24.0"],
    "fleet_and_paddock": ["fleet-python==0.2.133", "--editable", f"{REPOSITORY}[rollouts]"],
    "vendors": ["openai==3.49.0", "anthropic==2.8.0", "google-genai==3.1.0"],
    "both": ["openenv==0.10.0", "--editable", str(REPOSITORY)],
    "harbor": ["harbor==0.24.0"],
    # Parsing logs takes none of the other packages that it asks for.
    "swebench": ["--no-deps", "swebench==5.0.2", "unidiff==1.0.1"],
    "e2b": ["e2b==2.63.0", "e2b-code-interpreter==2.11.5", "--editable", f"{REPOSITORY}[rollouts]"],
    "trl": [
        *("trl==1.16.0", "torch==2.13.0", "transformers==5.22.2", "datasets==5.2.0", "accelerate==1.15.0"),
        *("--editable", f"{REPOSITORY}[rollouts,tokens]"),
    ],
    # Each of these drags in gigabytes that only a GPU needs; here is what importing their data types takes.
    "trainers": [
        *("--no-deps", "verl==0.9.1", "tinker==0.36.0", "tinker-cookbook==0.5.8", "verifiers==0.4.0"),
        *("aiofiles==25.1.0", "anthropic==2.8.0", "antlr4-python3-runtime==4.9.3", "blobfile==3.3.0"),
        *("cachetools==8.0.0", "certifi", "charset-normalizer==3.5.2", "chz==0.4.0", "cloudpathlib==0.26.0"),
        *("cloudpickle==3.1.2", "codetiming==1.4.0", "connectrpc==0.11.1", "distro==1.9.0"),
        *("docstring_parser==0.18.0", "fastapi==0.162.4", "func-timeout", "httpx==0.28.1", "hydra-core==1.3.8"),
        *("jaxtyping==0.3.11", "jiter==0.19.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
        *("latex2sympy2_extended==1.11.0", "loguru==0.7.3", "lxml==6.1.3", "math-verify==0.9.0", "msgpack==1.2.4"),
        *("omegaconf==2.4.0", "openai==3.49.0", "opentelemetry-api==1.45.2", "pillow==13.0.0"),
        *("prime-pydantic-config==0.4.3", "prime-sandboxes==0.5.1", "protobuf==7.36.2", "protobuf-py==0.1.1"),
        *("protobuf-py-ext==0.1.1", "pybase64==1.5.1", "pyqwest==0.12.0", "pyvers==0.2.3", "ray==2.56.0"),
        *("referencing==0.37.0", "renderers==0.1.12", "requests==2.34.2", "rpds-py==2026.9.1", "sniffio==1.3.1"),
        *("tenacity==9.2.1", "tensordict==0.15.3", "tomli_w==1.2.0", "torchdata==0.11.0", "urllib3==2.8.0"),
        "wadler_lindig==0.1.8",
    ],
}
TOO_NEW = {"trainers": ["skyrl==0.4.0", "skyrl-gym==0.4.0", "harbor==0.25.0"]}
"""Packages that ask for a newer Python than they need. Only pip can be told to look away."""
NEEDS_PYTHON = {"harbor": (3, 12)}
"""Packages whose code an older Python cannot read. What needs them is skipped where there is no such Python."""
ABOVE = {"trainers": "trl"}
"""An environment that also sees the packages of another: torch is installed once."""
LAST_MINOR = 14
OPTIONAL = {"verifiers": ["verifiers==0.4.0"]}
"""Built only when they are asked for by name: too heavy for every run. What needs them is skipped without them."""


def peer_python(name: str) -> Path:
    """The interpreter that has the peer installed, building its environment when there is none.

    Raises:
        subprocess.CalledProcessError: the environment could not be built.
    """
    root = PEERS / name
    ready = PEERS / f"{name}.ready"
    PEERS.mkdir(exist_ok=True)
    below = peer_python(ABOVE[name]) if name in ABOVE else None
    with (PEERS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != recipe(name):
            build(root, {**REQUIREMENTS, **OPTIONAL}[name], TOO_NEW.get(name, []), below)
            # Written last, so a build that was interrupted is never mistaken for a finished one.
            ready.write_text(recipe(name))
    return root / "bin" / "python"


def recipe(name: str) -> str:
    """What the environment is made from: it is rebuilt when this changes."""
    requirements = {**REQUIREMENTS, **OPTIONAL}[name]
    if "--editable" not in requirements:
        return "\n".join([*requirements, *TOO_NEW.get(name, []), ""])
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return "\n".join([*requirements, *project["dependencies"], *extras["rollouts"], *extras["tokens"]])


def build(root: Path, requirements: list[str], too_new: list[str], below: Path | None = None) -> None:
    print(f"building .peers/{root.name} with {' '.join([*requirements, *too_new])} …", file=sys.stderr, flush=True)
    if root.is_symlink():
        root.unlink()
    shutil.rmtree(root, ignore_errors=True)
    python = root / "bin" / "python"
    interpreter = find_interpreter(root.name)
    if interpreter is None:
        raise FileNotFoundError(f"there is no Python for the peer {root.name}")
    uv("venv", "--python", interpreter, str(root))
    if below is not None:
        own, seen = (packages(each.parent.parent) for each in (python, below))
        (own / "below.pth").write_text(f"import site; site.addsitedir({str(seen)!r})\n")
    uv("pip", "install", "--python", str(python), *requirements)
    if too_new:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--ignore-requires-python", *too_new], check=True, stdout=sys.stderr)


@cache
def find_interpreter(name: str) -> str | None:
    """A Python for the peer: the one that runs this, or a newer one on the PATH or of pyenv."""
    oldest = NEEDS_PYTHON.get(name, sys.version_info[:2])
    if sys.version_info >= oldest:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(oldest[1], LAST_MINOR + 1)]
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    places = [shutil.which(name) for name in names] + [
        str(place) for name in names for place in sorted(of_pyenv.glob(f"{name.removeprefix('python')}.*/bin/{name}"))
    ]
    # A shim of pyenv is on the PATH, and may fail to run.
    works = (
        place for place in places if place and subprocess.run([place, "-c", ""], capture_output=True).returncode == 0
    )
    return next(works, None)


def uv(*words: str) -> None:
    """Wheels that pip is told to look for in a folder are found there by uv too."""
    expected = {**os.environ, **({"UV_FIND_LINKS": links} if (links := os.environ.get("PIP_FIND_LINKS")) else {})}
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *words], check=True, stdout=sys.stderr, env=expected)


def packages(root: Path) -> Path:
    """Where an environment keeps what is installed in it."""
    return next((root / "lib").glob("python*/site-packages"))


if __name__ == "__main__":
    for peer in sys.argv[1:] or filter(find_interpreter, REQUIREMENTS):
        peer_python(peer)
