"""Which file `local:NAME` means."""

from pathlib import Path

import pytest

from paddock.errors import ConfigError
from paddock.models.gguf_files import find_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path


def put(file: Path, content: bytes = b"GGUF and more") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    file = put(tmp_path / "model.gguf")
    assert find_gguf(str(file)) == file


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GGUF file"):
        find_gguf(str(put(tmp_path / "model.gguf", b"PK")))


@pytest.mark.parametrize("name", ["qwen-0.5b-q4", "qwen-0.5b-q4.gguf", "Qwen/Qwen-GGUF"])
def test_a_name_finds_what_was_downloaded_before(cache: Path, name: str) -> None:
    put(cache / "paddock/models/other.gguf")
    file = put(cache / "huggingface/hub/models--Qwen--Qwen-GGUF/snapshots/abc/qwen-0.5b-q4.gguf")
    assert find_gguf(name) == file


def test_a_name_of_two_files_is_refused_with_both(cache: Path) -> None:
    for quantization in ("q4", "q8"):
        put(cache / f"huggingface/hub/models--Qwen--Qwen-GGUF/snapshots/abc/qwen-{quantization}.gguf")
    with pytest.raises(ConfigError, match=r"qwen-q4.gguf, qwen-q8.gguf"):
        find_gguf("Qwen/Qwen-GGUF")


def test_an_unknown_name_lists_what_there_is(cache: Path) -> None:
    put(cache / "paddock/models/other.gguf")
    with pytest.raises(ConfigError, match="no weights of that name") as caught:
        find_gguf("qwen")
    assert "downloaded before: other" in (caught.value.hint or "")
