"""Bind-mounts folders that only root can reach for a program that runs as another user.

A program of its own (standard library only), started as root: in a new mount namespace it binds the sources to
FOLDER/0, FOLDER/1 and so on, changes to the user, and executes the command. The host does not see the mounts.

Arguments: FOLDER USER COUNT SOURCE... COMMAND ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 4096, 16384, 1 << 18, 2, 4

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), None if options is None else options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def main() -> None:
    folder, user, count, *rest = sys.argv[1:]
    sources, command = rest[: int(count)], rest[int(count) :]
    if libc.unshare(CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "a mount namespace")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # Opened in the new namespace, and before the new filesystem covers what may lie below the folder.
    opened = [os.open(source, os.O_PATH) for source in sources]
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=64k")
    for position, descriptor in enumerate(opened):
        target = f"{folder}/{position}"
        if stat.S_ISDIR(os.stat(descriptor).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND | MS_REC)
        os.close(descriptor)
    os.setgroups([])
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"the folders of root cannot be mounted in the sandbox: {error}")
