"""A Debian base image for the tests of images: the one in the store, the registry's, or one made by mmdebstrap.

    python -m scripts.base_image                                           # debian:bookworm-slim
    python -m scripts.base_image python:3.11-slim --include python3,python3-pip

An image that mmdebstrap made is imported under the name that is asked for. It has the packages of Debian, so it is no
copy of the registry's image. Making one takes about a minute and needs a Debian mirror.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paddock.errors import ImageError
from paddock.sandbox.images.image import Image
from paddock.sandbox.images.importing import import_image
from paddock.sandbox.images.resolve import get_image
from scripts.debian_packages import install_programs

NAME = "debian:bookworm-slim"
SUITE = "bookworm"
PROGRAM = "mmdebstrap"
PULL_SECONDS = 300.0
MAKE_SECONDS = 900
LIST_SECONDS = 60


async def prepare_image(name: str, packages: list[str]) -> Image:
    """Raises ImageError, or CalledProcessError if mmdebstrap fails."""
    try:
        async with asyncio.timeout(PULL_SECONDS):
            return await get_image(name)
    except (ImageError, TimeoutError) as error:
        print(f"{error or 'the pull took too long'}; making {name} with {PROGRAM} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="paddock-base-") as folder:
        root = Path(folder, "root.tar")
        make_root(root, packages)
        return await import_image(root, name)


def make_root(archive: Path, packages: list[str]) -> None:
    """Write a minimal Debian root as a tar archive."""
    install_program()
    include = ",".join(["ca-certificates", *packages])
    options = ["--quiet", "--variant=minbase", f"--include={include}"]
    sources = machine_sources()
    # An ordinary user's temporary folder must be one that its subordinate ids can enter.
    archive.parent.chmod(0o755)
    command = [PROGRAM, *options, SUITE, str(archive), *sources]
    subprocess.run(command, check=True, timeout=MAKE_SECONDS, stdout=sys.stderr)


def machine_sources() -> list[str]:
    """The lines of sources.list with the mirrors that this machine uses for the suite; none: mmdebstrap's defaults.

    Sandboxes reach the registries of their machine, which may have private addresses. Other mirrors may not answer.
    """
    if shutil.which("apt-get") is None:
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"]
    output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIST_SECONDS).stdout
    targets = sorted({tuple(line.split()) for line in output.splitlines()})
    suites = (SUITE, f"{SUITE}-updates", f"{SUITE}-security")
    lines = [f"deb {' '.join(target)}" for target in targets if target[1] in suites and target[2] == "main"]
    return lines if any(target[1] == SUITE for target in targets) else []


def install_program() -> None:
    if install_programs([PROGRAM]):
        raise ImageError(f"{PROGRAM} is not installed", hint=f"run 'apt install {PROGRAM}'")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare a Debian base image for the tests of images.")
    parser.add_argument("name", nargs="?", default=NAME)
    parser.add_argument("--include", default="", help="Debian packages, separated by commas")
    options = parser.parse_args()
    try:
        image = asyncio.run(prepare_image(options.name, [name for name in options.include.split(",") if name]))
    except ImageError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{image.name} {image.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
