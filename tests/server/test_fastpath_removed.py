"""Without the package `server/fastpath` the server behaves the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paddock

SOURCE = Path(paddock.__file__).parent
TESTS = Path(__file__).parent.parent
SUITES = ["server/test_ws.py", "server/test_vector.py", "server/test_mcp.py", "client/test_client.py"]


@pytest.mark.timeout(240)
def test_the_suites_pass_with_the_package_deleted(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "paddock", ignore=shutil.ignore_patterns("fastpath", "__pycache__"))
    assert not (tmp_path / "paddock/server/fastpath").exists()
    # The copy comes before the installed package, which has the folder.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    where = "import paddock, importlib.util as u; print(paddock.__file__, u.find_spec('paddock.server.fastpath'))"
    completed = subprocess.run(
        [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == [str(tmp_path / "paddock/__init__.py"), "None"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-k", "not asgi", *(str(TESTS / suite) for suite in SUITES)]
    result = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
