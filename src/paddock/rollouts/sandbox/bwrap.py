"""The default sandbox: bubblewrap with namespaces of its own for everything, and no network but its loopback.

All that can be written is one filesystem in memory of `SandboxLimits.disk_bytes` at `/home`; `/tmp` and
`/logs` lead into it. The rest is read-only. Nothing that is written inside ever reaches a disk of the host.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.sandbox import seccomp
from paddock.rollouts.sandbox.base import HOME, TESTS, Mount, host_folder
from paddock.rollouts.sandbox.launch import Launched, launch, program_part, program_text
from paddock.rollouts.sandbox.leftovers import MARK
from paddock.rollouts.sandbox.programs import find_bwrap, find_python, libraries_of
from paddock.rollouts.sandbox.supervised import SupervisedSandbox, sealed, write_tests
from paddock.rollouts.sandbox.wire import close_all

if TYPE_CHECKING:
    from collections.abc import Iterable

NOBODY = 65534
INSIDE = "1000"
MOST_SHARED_MEMORY = 64 * 1024 * 1024
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SYSTEM_FILES = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl/certs",
    "ssl/openssl.cnf",
    "ca-certificates",
    "pki",
    "localtime",
    "mime.types",
)
OWN_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
RUN = PurePosixPath("/run/paddock/paddock-run")
STAGING_PLACES = ("/mnt", "/media", "/srv")
"""One of them is covered, in a mount namespace of its own, to show folders that only root can reach."""
HINTS = {
    "/proc/sys/user/max_": "allow more user namespaces: sysctl user.max_user_namespaces=10000",
    "namespace": "allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container also its seccomp profile), "
    "or use the process backend with consent",
    "uid map": "allow unprivileged user namespaces (kernel.apparmor_restrict_unprivileged_userns=0), "
    "or use the process backend with consent",
    "loopback": "the network namespace cannot be set up: allow unprivileged user namespaces in AppArmor or SELinux",
}


class BwrapSandbox(SupervisedSandbox):
    backend = "bwrap"
    isolates = True
    alone = True

    def prepare(self) -> None:
        self._bwrap = find_bwrap()
        self._python, folder = find_python()
        self._base_env = {
            "HOME": str(HOME),
            "USER": "user",
            "LOGNAME": "user",
            "LANG": "C.UTF-8",
            "PATH": f"{folder}/bin:{SYSTEM_PATH}" if folder else SYSTEM_PATH,
            "TMPDIR": "/tmp",
        }
        self._mounts = list(self.spec.mounts)
        if folder:
            self._mounts.append(Mount(folder, PurePosixPath(folder)))
        if self.spec.readonly_tests:
            self._base_env["PATH"] = f"{RUN.parent}:{self._base_env['PATH']}"
            place = host_folder(self.id)
            place.mkdir(mode=0o755)
            self.host_paths = (place,)
            write_tests(place / "tests", self.spec.readonly_tests)
            self._mounts.append(Mount(place / "tests", TESTS))
        for mount in self._mounts:
            if not mount.source.exists():
                raise SandboxError(f"{mount.source} cannot be mounted: it does not exist")
        if os.geteuid() == 0:
            self._file_owner = NOBODY

    def settings(self) -> dict[str, Any]:
        if not self.spec.readonly_tests:
            return super().settings()
        filters = [program for program in (seccomp.program_for_tests(),) if program]
        apart = {"apart": program_part("apart"), "filters": filters, "env": {**self._base_env, **self.spec.env}}
        return {**super().settings(), **apart}

    async def launch(self) -> Launched:
        information, information_inside = os.pipe()
        given: list[int] = [information_inside]
        stage: list[str] = []
        options: dict[str, Any] = {"env": {MARK: self.id}}
        try:
            program = str(self._bwrap)
            sources = [str(mount.source.resolve()) for mount in self._mounts]
            if os.geteuid() == 0:
                # Whoever the sandbox runs as may not be able to reach what root can: it gets descriptors instead.
                given.append(os.open(program, os.O_PATH))
                program = f"/proc/self/fd/{given[-1]}"
                libraries = [os.open(library, os.O_PATH) for library in libraries_of(self._bwrap)]
                given += libraries
                options["env"]["LD_PRELOAD"] = " ".join(f"/proc/self/fd/{library}" for library in libraries)
                if all(reachable(source) for source in sources):
                    options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
                else:
                    stage, sources = self._staged(sources)
            argv = [*stage, program, *self._namespaces(information_inside), *self._filesystem(given)]
            for source, mount in zip(sources, self._mounts, strict=True):
                argv += ["--ro-bind", source, str(mount.target)]
            argv += ["--remount-ro", "/", "--", self._python, "-I", "-S", "-c", program_text("supervisor")]
        except BaseException:
            close_all((information, *given))
            raise
        return await launch(argv, descriptors=given, information=information, **options)

    def _staged(self, sources: list[str]) -> tuple[list[str], list[str]]:
        """What to run in front of bubblewrap so that it reaches the sources, and where it finds them."""
        place = next((place for place in STAGING_PLACES if os.path.isdir(place)), None)
        if place is None:
            hint = "put what is mounted into a folder that everybody can read"
            raise SandboxError(f"{', '.join(sources)} can only be reached by root", hint=hint)
        program = [self._python, "-I", "-S", "-c", program_text("stage")]
        found = [f"{place}/{position}" for position in range(len(sources))]
        return [*program, place, str(NOBODY), str(len(sources)), *sources], found

    def _namespaces(self, information: int) -> Iterable[str]:
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", INSIDE, "--gid", INSIDE)
        yield from ("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv")
        if self.spec.readonly_tests:
            # The supervisor makes a sandbox for each `paddock-run`. No command that it starts keeps a capability.
            yield from ("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
        yield from ("--hostname", "sandbox", "--info-fd", str(information))

    def _filesystem(self, given: list[int]) -> Iterable[str]:
        """Everything but the mounts of the caller. Descriptors that it needs are added to `given`."""
        disk = int(self.spec.limits.disk_bytes)
        shared = min(MOST_SHARED_MEMORY, disk // 8)
        yield from ("--ro-bind", "/usr", "/usr")
        for folder in SYSTEM_FOLDERS:
            path = Path("/", folder)
            if path.is_symlink():
                yield from ("--symlink", os.readlink(path), str(path))
            elif path.is_dir():
                yield from ("--ro-bind", str(path), str(path))
        yield from ("--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/etc/ssl")
        for name in SYSTEM_FILES:
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        for name, content in OWN_FILES.items():
            given.append(sealed(name, content.encode()))
            yield from ("--perms", "0644", "--file", str(given[-1]), f"/etc/{name}")
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from ("--perms", "1777", "--size", str(shared), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
        yield from ("--perms", "0755", "--size", str(disk - shared), "--tmpfs", "/home")
        yield from ("--perms", "0755", "--dir", str(HOME), "--perms", "1777", "--dir", "/home/tmp")
        yield from ("--symlink", "home/tmp", "/tmp", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")
        yield from ("--symlink", "home/user/logs", "/logs", "--dir", "/run")
        if self.spec.readonly_tests:
            yield from ("--symlink", str(TESTS), str(HOME / "tests"), "--perms", "0755", "--dir", str(RUN.parent))
            text = f"#!{self._python} -IS\n{program_text('paddock_run')}"
            given.append(sealed("paddock-run", text.encode()))
            yield from ("--perms", "0755", "--file", str(given[-1]), str(RUN))
        filters = seccomp.program()
        if filters is not None:
            given.append(sealed("seccomp", filters))
            yield from ("--seccomp", str(given[-1]))

    def _stillborn(self, said: str) -> SandboxError:
        hint = next((hint for word, hint in HINTS.items() if word in said), None)
        return SandboxError(f"bubblewrap did not start: {said or 'it said nothing'}", hint=hint)

    def _end_processes(self) -> None:
        # The end of process 1 is the end of all: the kernel lets none of the others survive it.
        if self._launched is not None:
            self._launched.kill_at_once()
        super()._end_processes()


def reachable(path: str) -> bool:
    """Whether everybody may enter every folder on the way, and read what is there."""
    place = Path(path)
    entered = all(parent.stat().st_mode & stat.S_IXOTH for parent in place.parents)
    mode = place.stat().st_mode if entered else 0
    return bool(mode & stat.S_IROTH) and (not stat.S_ISDIR(mode) or bool(mode & stat.S_IXOTH))
