import pytest

from paddock.cli.serve_ray import absolute, read_scale
from paddock.errors import ConfigError
from paddock.scale.autoscale import Scale


def test_hosts_are_a_number_or_have_bounds() -> None:
    assert read_scale("3", None, None, None) == Scale(3, 3)
    assert read_scale("auto", None, 4, None) == Scale(1, 4)
    assert read_scale("auto", 2, 4, None) == Scale(2, 4)


@pytest.mark.parametrize(
    ("hosts", "fewest", "most"), [("many", None, None), ("3", 1, None), ("0", None, None), ("auto", 5, 4)]
)
def test_hosts_that_cannot_be_kept_are_refused(hosts: str, fewest: int | None, most: int | None) -> None:
    with pytest.raises(ConfigError):
        read_scale(hosts, fewest, most, None)


def test_a_file_is_found_from_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert absolute("envs/mine.py:Mine") == f"{tmp_path}/envs/mine.py:Mine"
    assert [absolute(other) for other in ("counter", "pkg.mod:Class")] == ["counter", "pkg.mod:Class"]
