"""A Chromium for the tests of the page: the one that is here, or Debian's."""

import shutil
import sys

from scripts.debian_packages import install_programs

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
HINT = "install Chromium, for example with 'apt install chromium'"


def find_browser() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def main() -> int:
    if find_browser() is not None:
        return 0
    if install_programs(PROGRAMS[:1]):
        print(f"the tests of the page need a browser: {HINT}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
