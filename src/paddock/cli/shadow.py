"""Whether `import paddock` loads our package, or another one of the same name that shadows it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from paddock.distribution import NAME, VERSION

IMPORT_NAME = "paddock"
PACKAGE = Path(__file__).resolve().parents[1]
LOOKUP_SECONDS = 10.0
LOOKUP = f"import importlib.util; spec = importlib.util.find_spec({IMPORT_NAME!r}); print(spec and spec.origin or '')"


def find_shadow() -> tuple[str, str] | None:
    """What shadows our package, and what to do about it. None if `import paddock` loads ours."""
    foreign = foreign_distributions()
    if foreign:
        names = ", ".join(f"{name} {version}" for name, version in foreign.items())
        overwritten = " and has overwritten our files" if is_overwritten() else ""
        problem = f"another distribution installs a package {IMPORT_NAME!r} too{overwritten}: {names}"
        return problem, f"pip uninstall {' '.join(foreign)} && pip install --force-reinstall {NAME}"
    if is_overwritten():
        problem = f"{PACKAGE / '__init__.py'} is not the one that {NAME} {VERSION} installs"
        return problem, f"pip install --force-reinstall {NAME}"
    origin = imported_elsewhere()
    if origin is not None:
        return f"Python imports {origin} in this folder", "rename it, or take its folder out of PYTHONPATH"
    return None


def foreign_distributions() -> dict[str, str]:
    """Installed distributions other than ours that bring a package `paddock`, with their versions."""
    owners = {*importlib.metadata.packages_distributions().get(IMPORT_NAME, ()), IMPORT_NAME}
    foreign = sorted(owner for owner in owners if re.sub(r"[-_.]+", "-", owner).lower() != NAME)
    return {name: version for name in foreign if (version := version_of(name)) is not None}


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_overwritten() -> bool:
    """Whether our `paddock/__init__.py` was replaced: commands run from the modules below it all the same."""
    return getattr(sys.modules.get(IMPORT_NAME), "__version__", None) != VERSION


def imported_elsewhere() -> str | None:
    """The file that `import paddock` loads in this folder if it is not ours: another folder of that name on the path.

    A separate process looks it up, because a console script does not search the folder that it is started in and
    `python -c` does. None if it is ours, or if it cannot be found out.
    """
    try:
        lookup = subprocess.run(
            [sys.executable, "-c", LOOKUP], capture_output=True, text=True, timeout=LOOKUP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    origin = lookup.stdout.strip()
    if lookup.returncode or not origin or Path(origin).resolve().parent == PACKAGE:
        return None
    return origin
