"""A small image from programs of this machine, for tests that need no registry."""

import re
import shutil
import subprocess
from pathlib import Path

from paddock.sandbox.images.image import Image, ImageConfig
from paddock.sandbox.images.importing import import_root
from paddock.sandbox.images.store import default_store

PROGRAMS = (
    "sh",
    "cat",
    "ls",
    "id",
    "mkdir",
    "ln",
    "touch",
    "chown",
    "chmod",
    "stat",
    "sleep",
    "dd",
    "rm",
    "true",
    "env",
)
PASSWD = "root:x:0:0:root:/root:/bin/sh\nbob:x:1000:1000::/home/bob:/bin/sh\n"
GROUP = "root:x:0:\nbob:x:1000:\nstaff:x:50:bob\n"


def make_root(folder: Path) -> Path:
    """A root with a shell and a few programs, their libraries, and two users."""
    for name in ("bin", "etc", "app", "home/bob", "opt"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/passwd").write_text(PASSWD)
    (folder / "etc/group").write_text(GROUP)
    (folder / "opt/link").symlink_to("/app")
    for program in PROGRAMS:
        source = Path(str(shutil.which(program)))
        shutil.copy(source, folder / "bin" / program)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+)", listed):
            target = folder / library.lstrip("/")
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, target)
    return folder


def make_image(folder: Path, **settings: object) -> Image:
    """The image of `make_root`, in the default store."""
    root = folder / "root"
    if not root.exists():
        make_root(root)
    return import_root(root, "small", ImageConfig(**settings), default_store())  # type: ignore[arg-type]
