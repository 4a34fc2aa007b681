import pytest

from paddock.testing import FakeClock


def test_time_passes_only_when_advanced() -> None:
    clock = FakeClock(start=5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock() == 7.5


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="-1"):
        FakeClock().advance(-1)
