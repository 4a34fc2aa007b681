import pytest

from paddock.cli.serve import absolute_target, parse_scaling
from paddock.errors import ConfigError
from paddock.scale.autoscale import ScalingPolicy


def test_hosts_are_a_number_or_have_bounds() -> None:
    assert parse_scaling("3", None, None, None) == ScalingPolicy(3, 3)
    assert parse_scaling("auto", None, 4, None) == ScalingPolicy(1, 4)
    assert parse_scaling("auto", 2, 4, None) == ScalingPolicy(2, 4)


@pytest.mark.parametrize(
    ("hosts", "fewest", "most"), [("many", None, None), ("3", 1, None), ("0", None, None), ("auto", 5, 4)]
)
def test_hosts_that_cannot_be_kept_are_refused(hosts: str, fewest: int | None, most: int | None) -> None:
    with pytest.raises(ConfigError):
        parse_scaling(hosts, fewest, most, None)


def test_a_file_is_found_from_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert absolute_target("envs/mine.py:Mine") == f"{tmp_path}/envs/mine.py:Mine"
    assert [absolute_target(other) for other in ("counter", "pkg.mod:Class")] == ["counter", "pkg.mod:Class"]
