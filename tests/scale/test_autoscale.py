import pytest

from paddock.errors import ConfigError
from paddock.scale.autoscale import Autoscaler, HostLoad, ScalingPolicy, hosts_to_retire


def hosts(*sessions: int, capacity: int = 10) -> list[HostLoad]:
    return [HostLoad(f"h{number}", count, capacity) for number, count in enumerate(sessions)]


def test_it_grows_when_new_clients_have_waited_a_moment() -> None:
    scaler = Autoscaler(ScalingPolicy(1, 4, grow_after=0.5))
    assert scaler.decide(0.0, hosts(10), waiting=12) == 1
    assert scaler.decide(0.4, hosts(10), waiting=12) == 1
    assert scaler.decide(0.5, hosts(10), waiting=12) == 3


def test_a_queue_that_empties_by_itself_adds_no_host() -> None:
    scaler = Autoscaler(ScalingPolicy(1, 4, grow_after=0.5))
    scaler.decide(0.0, hosts(10), waiting=1)
    scaler.decide(0.3, hosts(10), waiting=0)
    assert scaler.decide(0.6, hosts(10), waiting=1) == 1


def test_it_never_leaves_its_bounds() -> None:
    scaler = Autoscaler(ScalingPolicy(2, 3, grow_after=0, shrink_after=0))
    assert scaler.decide(0, hosts(0, 0), waiting=0) == 2
    assert scaler.decide(1, hosts(10, 10), waiting=500) == 3
    assert scaler.decide(2, hosts(0, 0, 0), waiting=0) == 2


def test_it_shrinks_only_after_a_long_idle_time() -> None:
    scaler = Autoscaler(ScalingPolicy(1, 3, grow_after=0, shrink_after=30))
    scaler.decide(0, hosts(10, 10), waiting=10)
    assert scaler.wanted == 3
    assert scaler.decide(10, hosts(2, 1, 0), waiting=0) == 3
    assert scaler.decide(39, hosts(2, 1, 0), waiting=0) == 3
    assert scaler.decide(40, hosts(2, 1, 0), waiting=0) == 1


def test_a_busy_moment_starts_the_idle_time_anew() -> None:
    scaler = Autoscaler(ScalingPolicy(1, 2, grow_after=0, shrink_after=30))
    scaler.decide(0, hosts(10), waiting=5)
    scaler.decide(10, hosts(3, 3), waiting=0)
    scaler.decide(30, hosts(10, 5), waiting=0)
    assert scaler.decide(45, hosts(3, 3), waiting=0) == 2


def test_the_hosts_with_the_fewest_sessions_go() -> None:
    assert hosts_to_retire(hosts(5, 0, 3), wanted=1) == ["h1", "h2"]
    assert hosts_to_retire(hosts(5, 0), wanted=2) == []


def test_all_hosts_together_have_the_capacity_that_was_asked_for() -> None:
    assert ScalingPolicy(3, 3).shares(100) == [34, 33, 33]
    assert ScalingPolicy(1, 4).shares(2) == [1, 1, 1, 1]


def test_bounds_that_cannot_be_kept_are_refused() -> None:
    for min_hosts, max_hosts in ((0, 1), (3, 2)):
        with pytest.raises(ConfigError):
            ScalingPolicy(min_hosts, max_hosts)
