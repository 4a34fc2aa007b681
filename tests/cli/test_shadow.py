import os
import sys
from pathlib import Path

import pytest

from paddock.cli import doctor, shadow


def test_our_own_package_is_no_shadow() -> None:
    assert shadow.find_shadow() is None


def test_a_folder_of_that_name_on_the_path_is_a_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paddock").mkdir()
    other = tmp_path / "paddock" / "__init__.py"
    other.touch()
    monkeypatch.chdir(tmp_path)
    finding = doctor.paddock()
    assert (finding.status, str(other) in finding.detail) == ("problem", True)


def test_a_distribution_of_that_name_is_a_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = tmp_path / "paddock-0.1.0b6.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: paddock\nVersion: 0.1.0b6\n")
    monkeypatch.setattr(sys, "path", [*sys.path, os.fspath(tmp_path)])
    finding = doctor.paddock()
    assert (finding.status, "paddock 0.1.0b6" in finding.detail) == ("problem", True)
    assert finding.hint == "pip uninstall paddock && pip install --force-reinstall paddock-rl"
