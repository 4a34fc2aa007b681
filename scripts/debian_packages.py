"""Programs that tests need and that Debian has: those that are here stay, the others are installed.

python -m scripts.debian_packages docker-registry skopeo
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

INSTALL_SECONDS = 600
LOCK = Path(tempfile.gettempdir(), f"paddock-apt-{os.geteuid()}.lock")
"""Several scripts run at once, and apt-get does not wait for another one."""


def install_programs(programs: Sequence[str]) -> list[str]:
    """Install the packages of programs that are missing; both have the same name. Returns what is still missing."""
    missing = find_missing(programs)
    if not missing or shutil.which("apt-get") is None or os.geteuid() != 0:
        return missing
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = find_missing(programs)
        if missing:
            print(f"installing {', '.join(missing)} …", file=sys.stderr, flush=True)
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
                words = ["apt-get", "--quiet", *command]
                subprocess.run(words, env=quiet, stdout=sys.stderr, check=True, timeout=INSTALL_SECONDS)
    return find_missing(programs)


def find_missing(programs: Sequence[str]) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


def main(programs: list[str]) -> int:
    missing = install_programs(programs)
    if missing:
        print(f"{', '.join(missing)} cannot be installed here: run apt install as root", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
