"""A Chromium for the tests of the page: the one that is here, or Debian's."""

import os
import shutil
import subprocess
import sys

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
HINT = "install Chromium, for example with 'apt install chromium'"


def find_browser() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def main() -> int:
    if find_browser() is not None:
        return 0
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"the tests of the page need a browser: {HINT}", file=sys.stderr)
        return 1
    print("installing Chromium for the tests of the page …", file=sys.stderr, flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", "--quiet", *command], env=quiet, stdout=sys.stderr, check=True)
    return 0 if find_browser() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
