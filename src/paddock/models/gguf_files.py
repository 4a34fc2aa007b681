"""Files of weights for llama.cpp on this machine: by path, or by the name of one that was downloaded before."""

from __future__ import annotations

from pathlib import Path

from paddock.config import hugging_face_folder, user_cache_folder
from paddock.errors import ConfigError

GGUF_MAGIC = b"GGUF"


def find_gguf(name: str) -> Path:
    """The file that `local:NAME` means. Raises ConfigError.

    NAME is the path of a GGUF file, or the name of one in Paddock's or Hugging Face's cache: the file's name, with or
    without `.gguf`, or `ORG/REPOSITORY` if one file of that repository was downloaded.
    """
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute():
        return check_gguf(path)
    candidates = [file for file in list_downloaded() if name in (file.name, file.stem, repository_of(file))]
    if len(candidates) == 1:
        return check_gguf(candidates[0])
    if candidates:
        names = ", ".join(sorted(file.name for file in candidates))
        raise ConfigError(f"local:{name} could be {names}", hint="give the name or the path of one")
    stems = ", ".join(sorted(file.stem for file in list_downloaded()))
    listed = f"; downloaded before: {stems}" if stems else ""
    raise ConfigError(f"there is no file {name}, and no weights of that name", hint=f"give a GGUF file{listed}")


def check_gguf(file: Path) -> Path:
    """The file that a user names. Raises ConfigError if it cannot be one."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="give the path of a GGUF file") from None
    if magic != GGUF_MAGIC:
        raise ConfigError(f"{file} is no GGUF file", hint="give weights in the GGUF format")
    return file.resolve()


def models_folder() -> Path:
    return user_cache_folder() / "models"


def list_downloaded() -> list[Path]:
    """GGUF files in Paddock's folder for models, and in the cache that Hugging Face's tools share."""
    repositories = (hugging_face_folder() / "hub").glob("models--*/snapshots/*/*.gguf")
    return [*models_folder().glob("*.gguf"), *repositories]


def repository_of(file: Path) -> str:
    """`ORG/REPOSITORY` of a file in Hugging Face's cache, where folders are named `models--ORG--REPOSITORY`."""
    folder = file.parents[2].name if len(file.parents) > 2 else ""
    return folder.removeprefix("models--").replace("--", "/") if folder.startswith("models--") else ""
