from conftest import FakeClock
from paddock.scale import host_registry as rules
from paddock.scale.host_registry import Host, HostRegistry, host_key, host_key_of


def registry_of(clock: FakeClock, *free: int, capacity: int = 4) -> HostRegistry:
    registry = HostRegistry(clock)
    for number, slots in enumerate(free):
        key = host_key(number, "00000000")
        registry.add(Host(key, f"http://h{number}", capacity, slots, clock(), sessions=capacity - slots))
    return registry


def chosen(registry: HostRegistry) -> str | None:
    assert registry.take()
    host = registry.claim()
    return host.url if host else None


def test_the_emptiest_host_is_chosen(clock: FakeClock) -> None:
    assert chosen(registry_of(clock, 1, 3, 2)) == "http://h1"


def test_new_clients_are_distributed_while_their_slots_are_requested(clock: FakeClock) -> None:
    registry = registry_of(clock, 2, 2, 2)
    assert {chosen(registry) for _ in range(3)} == {"http://h0", "http://h1", "http://h2"}


def test_no_more_are_let_in_than_there_is_room_for_over_all_hosts(clock: FakeClock) -> None:
    registry = registry_of(clock, 1, 0, 2)
    assert [registry.take() for _ in range(4)] == [True, True, True, False]
    assert [host.url for _ in range(3) if (host := registry.claim())].count("http://h1") == 0


def test_a_promise_that_is_given_back_lets_in_another(clock: FakeClock) -> None:
    registry = registry_of(clock, 1)
    assert registry.take()
    assert not registry.take()
    registry.give_back()
    assert registry.take()


def test_room_that_is_gone_meanwhile_is_not_claimed(clock: FakeClock) -> None:
    registry = registry_of(clock, 1)
    assert registry.take()
    registry.remove(host_key(0, "00000000"))
    assert registry.claim() is None
    assert not registry.take()


def test_capacity_and_sessions_are_summed(clock: FakeClock) -> None:
    registry = registry_of(clock, 1, 4)
    assert (registry.capacity, registry.in_use()) == (8, 3)


def test_a_retired_host_gets_no_sessions_and_is_not_counted(clock: FakeClock) -> None:
    registry = registry_of(clock, 4, 1)
    registry.retire(frozenset([host_key(0, "00000000")]))
    assert registry.capacity == 4
    assert chosen(registry) == "http://h1"
    assert not registry.take()
    registry.retire(frozenset())
    assert chosen(registry) == "http://h0"


def test_a_host_that_calls_in_again_is_retired_still(clock: FakeClock) -> None:
    registry = registry_of(clock, 4)
    key = host_key(0, "00000000")
    registry.retire(frozenset([key]))
    registry.add(Host(key, "http://h0", 4, 4, clock()))
    assert not registry.take()


def test_what_belongs_to_no_session_goes_to_a_full_host_too(clock: FakeClock) -> None:
    registry = registry_of(clock, 0, 0)
    assert registry.least_loaded() is not None
    assert HostRegistry(clock).least_loaded() is None


def test_silence_is_noticed_and_gone_means_that_it_stayed_away(clock: FakeClock) -> None:
    registry = registry_of(clock, 1)
    key = host_key(0, "00000000")
    clock.advance(rules.HOST_SILENCE_SECONDS)
    assert registry.silent_hosts() == []
    clock.advance(0.1)
    assert registry.silent_hosts() == [key]
    registry.remove(key)
    assert registry.lost_hosts() == []
    clock.advance(rules.RECONNECT_GRACE_SECONDS + 0.01)
    assert registry.lost_hosts() == [key]
    registry.add(Host(key, "http://h0", 4, 4, clock()))
    assert registry.lost_hosts() == []


def test_a_token_names_the_incarnation_of_its_host() -> None:
    key = host_key(10, "0123abcd")
    assert key == "00a-0123abcd"
    assert host_key_of(f"{key}-27960756-cbf0-4808-ae53-db14ea56a3b3") == key
    assert [host_key_of(other) for other in (None, "", "new", key, "0027960756-cbf0-4808-ae53-db14ea56a3b3")] == [
        None
    ] * 5
