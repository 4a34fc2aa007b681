"""The `command:` agent: any program of the host or of the sandbox."""

from pathlib import Path

import pytest

from paddock.agents import load_agent
from paddock.agents.command import CommandAgent
from paddock.errors import ConfigError
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import needs_bwrap, rolled


def test_an_unclosed_quote_is_refused() -> None:
    with pytest.raises(ConfigError):
        load_agent("command:python3 'oops")


def test_a_program_of_the_host_must_be_executable(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="cannot be executed"):
        CommandAgent(str(script))


@needs_bwrap
def test_a_program_of_the_host_is_mounted_read_only_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "helper.txt").write_text("42")
    script = folder / "agent.sh"
    script.write_text(
        '#!/bin/bash\ncd "$(dirname "$0")" && cp helper.txt ~/workdir/answer.txt; echo "$0 $1"; echo x > helper.txt\n'
    )
    script.chmod(0o755)
    with Store.open(tmp_path / "store") as store:
        record = rolled(store, CommandAgent(f"{script} 'two words'"))
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert "/opt/agent/agent.sh two words" in record.agent_log
    assert (folder / "helper.txt").read_text() == "42"


def test_a_script_after_its_interpreter_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    agent = CommandAgent("python3 -I ./agent.py ./missing.txt")
    assert agent.words == ["python3", "-I", "/opt/agent/agent.py", "./missing.txt"]
    assert agent.host_file == tmp_path / "agent.py"
    assert CommandAgent(f"cat {tmp_path / 'agent.py'}").host_file is None
