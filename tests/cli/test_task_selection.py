import json
from pathlib import Path

import pytest

from paddock.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instruction.md").write_text(f"Do {name}.")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ([], {"a", "b", "c", "d"}),
        (["--limit", "1"], {"a"}),
        (["--filter", "[bc]"], {"b", "c"}),
        (["--shard", "2/2"], {"b", "d"}),
        (["--filter", "/[bcd]/", "--shard", "1/2", "--limit", "1"], {"b"}),
    ],
)
def test_check_takes_a_part_of_a_set(
    folder: Path, options: list[str], ids: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["check", str(folder), "--json", *options])
    results = json.loads(capsys.readouterr().out)["results"]
    assert {result["name"].partition(":")[0] for result in results} == ids


@pytest.mark.parametrize("command", [["check"], ["rollout", "--model", "demo"]], ids=["check", "rollout"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--filter", "x*"], "leave none of the 4 tasks"),
        (["--shard", "5/4"], "the shard is '5/4'"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_a_selection_without_a_task_is_an_error(
    folder: Path, command: list[str], options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command[0], str(folder), *command[1:], *options])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
