"""Read a task folder in Harbor's layout.

    task.toml        optional: see `task_toml` for its keys
    instruction.md   what the agent is asked
    environment/     with a Dockerfile: its context. Otherwise: files that are staged into the work folder, and
                     setup.sh, which is run there and not staged
    tests/           the verifier's files; test.sh is run. With a separate verifier, its Dockerfile is built
    solution/        a reference solution; solve.sh is run
    steps/NAME/      of a task with steps: instruction.md, tests/, solution/ and workdir/ of each

Keys of task.toml that mean nothing here are named in `metadata["unknown_keys"]`, and tables with a misspelled name in
`metadata["misspelled_tables"]` too. Empty folders, `__pycache__` and
what a `.harborignore` names in tests/ and solution/ are left out.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.errors import TaskError
from paddock.limits import MEBIBYTE, RolloutTimeouts
from paddock.sandbox.images.image import DOCKERFILE
from paddock.tasks import task_toml
from paddock.tasks.ignore_patterns import without_ignored
from paddock.tasks.requirements import MISSPELLED_TABLES, UNKNOWN_KEYS
from paddock.tasks.settings import (
    PUBLIC,
    AgentSettings,
    TaskImage,
    TaskNetwork,
    TaskSettings,
    TaskStep,
    VerifierSettings,
)
from paddock.tasks.task import LARGEST_FILE, LARGEST_INSTRUCTION, LINK_MODE, MOST_FILES, PLAIN_MODE, Task, check_size
from paddock.tasks.task_toml import StepTable, TaskToml, TomlDocument, VerifierTable, read_task_toml

if TYPE_CHECKING:
    from paddock.sandbox.network.policy import NetworkPolicy

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
SETUP = "setup.sh"
COMPOSE = re.compile(r"(docker-)?compose(\..+)?\.ya?ml")
IMAGE_VERIFIER_SECONDS = 600.0
"""Harbor's default for the tests."""


def is_task_folder(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / INSTRUCTION).is_file()


def task_folder_id(folder: Path) -> str:
    """The id that the task in `folder` has, without reading its files."""
    return _read_toml(folder).document.task.name or folder.resolve().name


def read_task_folder(path: str | Path) -> Task:
    """The task in a folder. Raises TaskError naming the file and what is wrong with it."""
    folder = Path(path)
    if not folder.is_dir():
        raise TaskError(f"{folder} is not a folder", hint=f"a task is a folder with {INSTRUCTION} in it")
    try:
        return _read_task(folder)
    except TaskError as error:
        if str(folder) in error.message:
            raise
        # Raised by a value that does not know where it comes from.
        raise TaskError(f"{folder / CONFIG}: {error}", hint=error.hint) from error


def _read_task(folder: Path) -> Task:
    toml = _read_toml(folder)
    document, file = toml.document, str(folder / CONFIG)
    environment = document.environment
    steps = tuple(_read_step(folder, table, file) for table in document.steps)
    environment_folder = folder / "environment"
    has_dockerfile = not environment.docker_image and (environment_folder / DOCKERFILE).is_file()
    files, modes = _read_tree(environment_folder, keeps_links=has_dockerfile)
    image = _image(environment.docker_image, files, environment_folder)
    setup = _setup(environment.setup, files, folder, image)
    special = (SETUP,) if image is None else (DOCKERFILE,)
    staged = {name: data for name, data in files.items() if name not in special}
    tests = without_ignored(_read_tree(folder / "tests")[0])
    unknown = {UNKNOWN_KEYS: list(toml.unknown_keys), MISSPELLED_TABLES: list(toml.misspelled_tables)}
    return Task(
        instruction=_instruction(folder, steps),
        id=document.task.name or folder.resolve().name,
        files=staged,
        modes={name: mode for name, mode in modes.items() if name in staged},
        setup=setup,
        tests=tests,
        solution=without_ignored(_read_tree(folder / "solution")[0]),
        sandbox=task_toml.environment_limits(environment, file, on_image=image is not None),
        timeouts=_timeouts(document, on_image=image is not None),
        image=image,
        network=TaskNetwork(
            task_toml.network_policy(environment, f"{file}: environment"),
            task_toml.network_policy(document.agent, f"{file}: agent"),
            _verifier_network(document.verifier, f"{file}: verifier"),
        ),
        settings=_settings(document, files, tests, file),
        steps=steps,
        metadata={**toml.metadata, **{name: keys for name, keys in unknown.items() if keys}},
        source=str(folder),
    )


def _read_toml(folder: Path) -> TaskToml:
    return read_task_toml(_read_text(folder / CONFIG, MEBIBYTE) or "", str(folder / CONFIG))


def _instruction(folder: Path, steps: tuple[TaskStep, ...]) -> str:
    """With steps it may be missing or empty: then it is that of the first one."""
    instruction = _read_text(folder / INSTRUCTION, LARGEST_INSTRUCTION)
    if steps and not (instruction or "").strip():
        return steps[0].instruction
    if instruction is None:
        raise TaskError(f"{folder} has no {INSTRUCTION}", hint="write there what the agent has to do")
    return instruction


def _image(name: str, files: dict[str, bytes], folder: Path) -> TaskImage | None:
    if name:
        return TaskImage(name=name)
    if DOCKERFILE not in files:
        return None
    dockerfile = _decoded(files[DOCKERFILE], folder / DOCKERFILE)
    if not dockerfile.strip():
        raise TaskError(f"{folder / DOCKERFILE} is empty", hint="write FROM and the name of an image")
    return TaskImage(dockerfile=dockerfile)


def _setup(setup: str, files: dict[str, bytes], folder: Path, image: TaskImage | None) -> str:
    if SETUP not in files or image is not None:
        return setup
    if setup:
        raise TaskError(
            f"{folder}: both environment/{SETUP} and [environment] setup are given", hint="keep one of them"
        )
    return _decoded(files[SETUP], folder / "environment" / SETUP)


def _timeouts(document: TomlDocument, *, on_image: bool) -> RolloutTimeouts:
    seconds = {
        "agent": document.agent.timeout_sec,
        "verifier": document.verifier.timeout_sec or (IMAGE_VERIFIER_SECONDS if on_image else None),
        # Without an image, the set-up shell does what a build would do.
        "setup": None if on_image else document.environment.build_timeout_sec,
    }
    return RolloutTimeouts(**{name: value for name, value in seconds.items() if value is not None})


def _settings(document: TomlDocument, files: dict[str, bytes], tests: dict[str, bytes], file: str) -> TaskSettings:
    compose = next((name for name in files if COMPOSE.fullmatch(name)), "")
    return TaskSettings(
        environment=task_toml.environment_settings(document.environment, compose=compose),
        agent=AgentSettings(str(document.agent.user)),
        verifier=_verifier(document.verifier, tests, file),
        solution_env=document.solution.env,
        artifacts=task_toml.artifact_values(document.artifacts),
        reward_strategy=document.multi_step_reward_strategy or "mean",
    )


def _verifier(table: VerifierTable, tests: dict[str, bytes], file: str) -> VerifierSettings:
    mode, environment = table.chosen_mode, table.environment
    name = environment.docker_image if environment is not None else ""
    dockerfile = tests.get(DOCKERFILE, b"").decode("utf-8", "replace") if mode == "separate" else ""
    compose = next((name for name in tests if COMPOSE.fullmatch(name)), "") if mode == "separate" else ""
    own = None
    if environment is not None or compose:
        own = task_toml.environment_settings(environment or task_toml.EnvironmentTable(), compose=compose)
    return VerifierSettings(
        mode=mode,
        env=table.env,
        user=str(table.user),
        image=TaskImage(name, "" if name else dockerfile) if name or dockerfile.strip() else None,
        environment=own,
        limits=None if environment is None else task_toml.environment_limits(environment, file, on_image=True),
        collect=task_toml.collect_commands(table),
        shared=table.environment_mode == "shared",
    )


def _verifier_network(table: VerifierTable, where: str) -> NetworkPolicy | None:
    """With an environment of its own, a verifier does not have the policy of the task's."""
    policy = task_toml.network_policy(table, where)
    if policy is not None or table.environment is None:
        return policy
    return task_toml.network_policy(table.environment, f"{where}.environment") or PUBLIC


def _read_step(folder: Path, table: StepTable, file: str) -> TaskStep:
    place = folder / "steps" / table.name
    if not table.name or "/" in table.name or table.name in (".", ".."):
        raise TaskError(f"{file}: steps: {table.name!r} is not a name", hint="use the name of a folder below steps/")
    instruction = _read_text(place / INSTRUCTION, LARGEST_INSTRUCTION)
    if instruction is None:
        missing = f"steps/{table.name}/{INSTRUCTION}"
        raise TaskError(f"{file}: step {table.name} has no {missing}", hint="write there what the agent has to do")
    tests = without_ignored(_read_tree(place / "tests")[0])
    files, modes = _read_tree(place / "workdir")
    least = table.min_reward
    return TaskStep(
        name=table.name,
        instruction=instruction,
        files=files,
        modes=modes,
        tests=tests,
        solution=without_ignored(_read_tree(place / "solution")[0]),
        agent=AgentSettings(str(table.agent.user), table.agent.timeout_sec),
        verifier=replace(_verifier(table.verifier, tests, file), timeout=table.verifier.timeout_sec),
        network=TaskNetwork(
            agent=task_toml.network_policy(table.agent, f"{file}: step {table.name}: agent"),
            verifier=_verifier_network(table.verifier, f"{file}: step {table.name}: verifier"),
        ),
        min_reward={} if least is None else {"reward": least} if isinstance(least, int | float) else least,
        health_check=task_toml.health_check(table.healthcheck),
        artifacts=task_toml.artifact_values(table.artifacts),
    )


def _read_tree(root: Path, *, keeps_links: bool = False) -> tuple[dict[str, bytes], dict[str, int]]:
    """All files below a folder by their relative path, and the modes of those that can be run, or are links."""
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
            if keeps_links and name != DOCKERFILE and entry.is_symlink():
                data, mode = os.fsencode(os.readlink(path)), LINK_MODE
            else:
                data, runnable = _read_file(path, LARGEST_FILE)
                mode = 0o755 if runnable else PLAIN_MODE
            total += len(data)
            check_size(name, len(data), total, str(root))
            files[name] = data
            if mode != PLAIN_MODE:
                modes[name] = mode
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
    hint = "put the file itself there: only the build context of a Dockerfile may have links"
    return TaskError(f"{path} is a symlink", hint=hint)
