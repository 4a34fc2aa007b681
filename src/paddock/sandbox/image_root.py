"""How bubblewrap makes an image the root of a sandbox: its layers, a writable layer, and what every root needs.

An image is untrusted, and bubblewrap follows links when it makes a mount point. So a skeleton lies above the layers
of the image: a layer of our own with a plain folder or file at each mount point, which hides any link of the image
there. It also holds `/etc/hosts` and its kin, so that none of this is written to the writable layer.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paddock.sandbox.guest.users import find_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paddock.sandbox.base import Mount
    from paddock.sandbox.images.image import ImageConfig
    from paddock.sandbox.user_namespace import Identity

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP"),
    *("CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE", "CAP_NET_RAW"),
)
"""What root has in a container, as far as it means anything in a user namespace."""
SKELETON_FILES = {
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
SKELETON_VERSION = 1
"""Raise it when `make_skeleton` makes another one than before from the same arguments."""
SKELETON_CHARACTERS = 16
SKELETON_FOLDERS = {"proc": 0o555, "dev": 0o755, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "etc": 0o755}
APT_SETTINGS = "etc/apt/apt.conf.d/90paddock"
"""With a single id there is no user `_apt` to change to."""
AGENT_HOME = PurePosixPath("/home/paddock")
"""The home of a user to whom the image gives none."""
PROGRAMS = PurePosixPath("/run/paddock/bin")
LOG_FOLDERS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


def find_skeleton(parent: Path, mounts: Sequence[Mount], identity: Identity, programs: Mapping[str, bytes]) -> Path:
    """The skeleton with these mount points, which stays in `parent` for all sandboxes with the same ones.

    Some filesystems take milliseconds to remove a folder: a skeleton for each sandbox costs a third of its time.
    """
    points = sorted((str(mount.target), mount.source.is_dir()) for mount in mounts)
    content = (SKELETON_VERSION, identity.kind, points, sorted(programs.items()))
    folder = parent / hashlib.sha256(repr(content).encode()).hexdigest()[:SKELETON_CHARACTERS]
    if not folder.exists():
        parent.mkdir(mode=0o711, exist_ok=True)
        with TemporaryDirectory(dir=parent, prefix="new-") as temporary:
            made = Path(temporary, "skeleton")
            make_skeleton(made, mounts, identity, programs)
            try:
                made.rename(folder)
            except OSError:
                # Another process may have made it meanwhile.
                if not folder.exists():
                    raise
    return folder


def make_skeleton(folder: Path, mounts: Iterable[Mount], identity: Identity, programs: Mapping[str, bytes]) -> None:
    """Fill a new folder with a plain entry for each mount point, and with the files that every root has."""
    folder.mkdir(mode=0o755)
    for name in SKELETON_FOLDERS:
        (folder / name).mkdir()
    for name, text in SKELETON_FILES.items():
        (folder / name).write_text(text)
    if identity.kind == "single":
        (folder / APT_SETTINGS).parent.mkdir(mode=0o755, parents=True)
        (folder / APT_SETTINGS).write_text('APT::Sandbox::User "root";\n')
    for name, content in programs.items():
        program = folder / PROGRAMS.relative_to("/") / name
        program.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        program.write_bytes(content)
    for mount in mounts:
        target = folder / mount.target.relative_to("/")
        if mount.source.is_dir():
            target.mkdir(mode=0o755, parents=True, exist_ok=True)
        else:
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.touch(mode=0o644)
    owner, group = identity.host_uid(0), identity.host_gid(0)
    assert owner is not None
    assert group is not None
    for path, _, names in os.walk(folder):
        relative = os.path.relpath(path, folder)
        # Whatever the umask of this process is: other sandboxes get this skeleton too.
        os.chmod(path, SKELETON_FOLDERS.get(relative, 0o755))
        for name in names:
            os.chmod(os.path.join(path, name), 0o755 if name in programs else 0o644)
        for entry in (path, *(os.path.join(path, name) for name in names)):
            if os.geteuid() == 0:
                os.chown(entry, owner, group)


def find_home(layers: Sequence[Path], user: str) -> PurePosixPath | None:
    """The home that an image gives a user `NAME[:GROUP]` or `UID[:GID]`. None if it has no such folder."""
    entry = _find_user(layers, user)
    home = PurePosixPath(entry[5]) if entry is not None else PurePosixPath("/")
    if not home.is_absolute() or home == PurePosixPath("/"):
        return None
    return home if any((layer / home.relative_to("/")).is_dir() for layer in layers) else None


def find_ids(layers: Sequence[Path], user: str) -> tuple[int, int] | None:
    """The ids of a user `NAME` or `UID` and of its group. None if the image does not say both."""
    entry = _find_user(layers, user)
    return None if entry is None or ":" in user else (int(entry[2]), int(entry[3]))


def _find_user(layers: Sequence[Path], user: str) -> list[str] | None:
    for layer in reversed(layers):
        passwd = layer / "etc/passwd"
        if passwd.is_file() and not passwd.is_symlink():
            return find_entry(str(passwd), user.partition(":")[0])
    return None


def base_environment(config: ImageConfig, home: PurePosixPath) -> Mapping[str, str]:
    return {"PATH": DEFAULT_PATH, "HOME": str(home), **config.env}


def overlay_arguments(lower: Iterable[str], writable: tuple[str, str] | None) -> Iterable[str]:
    """The root: layers, lowest first, and the writable layer on disk with its work folder, or one in memory."""
    for path in lower:
        yield from ("--overlay-src", path)
    if writable is None:
        yield from ("--tmp-overlay", "/")
    else:
        yield from ("--overlay", *writable, "/")
