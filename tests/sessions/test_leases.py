import pytest

from paddock.sessions.capacity import LEASE_SECONDS, Leases


def test_a_lease_is_used_once() -> None:
    leases = Leases()
    lease = leases.grant("000-00000000", now=0.0)
    assert lease.startswith("000-00000000-")
    assert leases.redeem(lease)
    assert not leases.redeem(lease)


@pytest.mark.parametrize("lease", [None, "", "000-00000000-0123"])
def test_an_unknown_lease_is_refused(lease: str | None) -> None:
    leases = Leases()
    leases.grant("", now=0.0)
    assert not leases.redeem(lease)
    assert len(leases) == 1


def test_a_lease_runs_out() -> None:
    leases = Leases()
    lease = leases.grant("", now=10.0)
    assert leases.expired(10.0 + LEASE_SECONDS - 0.1) == []
    assert leases.expired(10.0 + LEASE_SECONDS) == [lease]
