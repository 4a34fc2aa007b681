from conftest import FakeClock
from paddock.scale import roster as rules
from paddock.scale.roster import Host, Roster, host_key, key_in


def roster(clock: FakeClock, *free: int, capacity: int = 4) -> Roster:
    found = Roster(clock)
    for number, slots in enumerate(free):
        key = host_key(number, "00000000")
        found.join(Host(key, f"http://h{number}", capacity, slots, clock(), sessions=capacity - slots))
    return found


def chosen(found: Roster) -> str | None:
    assert found.take()
    host = found.claim()
    return host.url if host else None


def test_the_emptiest_host_is_chosen(clock: FakeClock) -> None:
    assert chosen(roster(clock, 1, 3, 2)) == "http://h1"


def test_newcomers_are_spread_while_their_slots_are_asked_for(clock: FakeClock) -> None:
    found = roster(clock, 2, 2, 2)
    assert {chosen(found) for _ in range(3)} == {"http://h0", "http://h1", "http://h2"}


def test_no_more_are_let_in_than_there_is_room_for_over_all_hosts(clock: FakeClock) -> None:
    found = roster(clock, 1, 0, 2)
    assert [found.take() for _ in range(4)] == [True, True, True, False]
    assert [host.url for _ in range(3) if (host := found.claim())].count("http://h1") == 0


def test_a_promise_that_is_given_back_lets_in_another(clock: FakeClock) -> None:
    found = roster(clock, 1)
    assert found.take()
    assert not found.take()
    found.give_back()
    assert found.take()


def test_room_that_is_gone_meanwhile_is_not_claimed(clock: FakeClock) -> None:
    found = roster(clock, 1)
    assert found.take()
    found.leave(host_key(0, "00000000"))
    assert found.claim() is None
    assert not found.take()


def test_capacity_and_sessions_are_summed(clock: FakeClock) -> None:
    found = roster(clock, 1, 4)
    assert (found.capacity, found.taken()) == (8, 3)


def test_a_retired_host_takes_nobody_and_counts_no_more(clock: FakeClock) -> None:
    found = roster(clock, 4, 1)
    found.retire(frozenset([host_key(0, "00000000")]))
    assert found.capacity == 4
    assert chosen(found) == "http://h1"
    assert not found.take()
    found.retire(frozenset())
    assert chosen(found) == "http://h0"


def test_a_host_that_calls_in_again_is_retired_still(clock: FakeClock) -> None:
    found = roster(clock, 4)
    key = host_key(0, "00000000")
    found.retire(frozenset([key]))
    found.join(Host(key, "http://h0", 4, 4, clock()))
    assert not found.take()


def test_what_belongs_to_no_session_goes_to_a_full_host_too(clock: FakeClock) -> None:
    found = roster(clock, 0, 0)
    assert found.least_loaded() is not None
    assert Roster(clock).least_loaded() is None


def test_silence_is_noticed_and_gone_means_that_it_stayed_away(clock: FakeClock) -> None:
    found = roster(clock, 1)
    key = host_key(0, "00000000")
    clock.advance(rules.SILENT_FOR)
    assert found.silent() == []
    clock.advance(0.1)
    assert found.silent() == [key]
    found.leave(key)
    assert found.gone() == []
    clock.advance(rules.REDIAL_GRACE + 0.01)
    assert found.gone() == [key]
    found.join(Host(key, "http://h0", 4, 4, clock()))
    assert found.gone() == []


def test_a_token_names_the_life_of_its_host() -> None:
    key = host_key(10, "0123abcd")
    assert key == "00a-0123abcd"
    assert key_in(f"{key}-27960756-cbf0-4808-ae53-db14ea56a3b3") == key
    assert [key_in(other) for other in (None, "", "new", key, "0027960756-cbf0-4808-ae53-db14ea56a3b3")] == [None] * 5
