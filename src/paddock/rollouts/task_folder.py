"""Read a task folder. The layout is Harbor's; what its Dockerfile would do, a set-up shell does here.

    task.toml        optional: [task] name, [metadata], [agent] and [verifier] timeout_sec, [environment] limits
    instruction.md   what the agent is asked
    environment/     files that are staged into the work folder; setup.sh is run there and not staged
    tests/           the verifier's files; test.sh is run
    solution/        a reference solution; solve.sh is run

No image is built: a Dockerfile is left out and named in `metadata["not_built"]`, as is all else that no sandbox here
has, and such a task is not run (see `task_needs`). Keys of task.toml that
mean nothing here are named in `metadata["unknown_keys"]`. Empty folders and `__pycache__` are left out.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from paddock.errors import TaskError
from paddock.rollouts import task_needs
from paddock.rollouts.limits import MEBIBYTE
from paddock.rollouts.task import LARGEST_FILE, LARGEST_INSTRUCTION, MOST_FILES, Task, check_size
from paddock.rollouts.task_toml import TaskToml

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
SETUP = "setup.sh"
NOT_BUILT = re.compile(r"Dockerfile(\..+)?|(docker-)?compose(\..+)?\.ya?ml|\.dockerignore")


def is_task_folder(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / INSTRUCTION).is_file()


def task_folder_id(folder: Path) -> str:
    """The id that the task in `folder` has, without reading its files."""
    return _read_toml(folder).name or folder.resolve().name


def read_task_folder(path: str | Path) -> Task:
    """The task in a folder. Raises TaskError naming the file and what is wrong with it."""
    folder = Path(path)
    if not folder.is_dir():
        raise TaskError(f"{folder} is not a folder", hint=f"a task is a folder with {INSTRUCTION} in it")
    instruction = _read_text(folder / INSTRUCTION, LARGEST_INSTRUCTION)
    if instruction is None:
        raise TaskError(f"{folder} has no {INSTRUCTION}", hint="write there what the agent has to do")
    config = _read_toml(folder)
    files, modes = _read_tree(folder / "environment")
    metadata = config.metadata
    tests = _read_tree(folder / "tests")[0]
    not_built = [name for name in files if NOT_BUILT.fullmatch(name)]
    own_image = ["tests/Dockerfile"] if "Dockerfile" in tests else []
    if not_built or own_image or config.not_built:
        metadata[task_needs.NOT_BUILT] = [*not_built, *own_image, *config.not_built]
    if config.docker_image:
        metadata[task_needs.IMAGE_NAME] = config.docker_image
    if config.unknown:
        metadata["unknown_keys"] = config.unknown
    setup = config.setup
    if SETUP in files:
        if setup:
            raise TaskError(
                f"{folder}: both environment/{SETUP} and [environment] setup are given", hint="keep one of them"
            )
        setup = _decoded(files[SETUP], folder / "environment" / SETUP)
    staged = {name: data for name, data in files.items() if name != SETUP and name not in not_built}
    return Task(
        instruction=instruction,
        id=config.name or folder.resolve().name,
        files=staged,
        modes={name: mode for name, mode in modes.items() if name in staged},
        setup=setup,
        tests=tests,
        solution=_read_tree(folder / "solution")[0],
        sandbox=config.sandbox,
        timeouts=config.timeouts,
        metadata=metadata,
        source=str(folder),
    )


def _read_toml(folder: Path) -> TaskToml:
    return TaskToml(folder / CONFIG, _read_text(folder / CONFIG, MEBIBYTE) or "")


def _read_tree(root: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """All files below a folder by their relative path, and the modes of those that can be run."""
    files: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    total = 0
    if root.is_symlink():
        raise _symlink(root)
    waiting = [root] if root.exists() else []
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise TaskError(f"{folder} cannot be read: {error.strerror}", hint="make it a readable folder") from error
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                # Left by whoever ran the code last, an installer included: it says nothing about the task.
                if entry.name != "__pycache__":
                    waiting.append(path)
                continue
            name = path.relative_to(root).as_posix()
            data, runnable = _read_file(path, LARGEST_FILE)
            total += len(data)
            check_size(name, len(data), total, str(root))
            files[name] = data
            if runnable:
                modes[name] = 0o755
            if len(files) > MOST_FILES:
                raise TaskError(f"{root} holds more than {MOST_FILES} files", hint="pack them in an archive")
    return dict(sorted(files.items())), modes


def _read_file(path: Path, limit: int) -> tuple[bytes, bool]:
    """The content of a plain file, and whether its owner may run it."""
    try:
        # Non-blocking, so that a named pipe is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _symlink(path) from None
        raise TaskError(f"{path} cannot be read: {error.strerror}", hint="make it a readable file") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TaskError(f"{path} is not a plain file", hint="task folders hold plain files and folders only")
        if status.st_size > limit:
            raise TaskError(f"{path} has {status.st_size} bytes, over {limit}", hint="make large files in setup.sh")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit), bool(status.st_mode & stat.S_IXUSR)
    finally:
        os.close(descriptor)


def _read_text(path: Path, limit: int) -> str | None:
    """The text of a file; None if there is no such file."""
    if not path.is_symlink() and not path.exists():
        return None
    return _decoded(_read_file(path, limit)[0], path)


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TaskError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None


def _symlink(path: Path) -> TaskError:
    return TaskError(f"{path} is a symlink", hint="put the file itself there: task folders hold no links")
