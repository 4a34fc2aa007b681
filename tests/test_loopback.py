import pytest

from paddock.loopback import is_loopback, is_loopback_url


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_names_and_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "10.0.0.1", "::", "localhost.example", "127.0.0.1.example", "[::1]"])
def test_other_hosts(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://LOCALHOST:8000/v1", True),
        ("http://user:key@[::1]:8000", True),
        ("//127.0.0.2:5000", True),
        ("https://models.example/v1", False),
        ("no url", False),
    ],
)
def test_the_host_of_a_url_counts(url: str, expected: bool) -> None:
    assert is_loopback_url(url) is expected
