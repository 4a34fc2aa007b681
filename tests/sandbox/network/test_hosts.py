"""Names and addresses: what is public, what a list matches, what is no host at all."""

import ipaddress

import pytest

from paddock.errors import ConfigError
from paddock.sandbox.network.addresses import describe_special, parse_address
from paddock.sandbox.network.hosts import HostRules, normalize_host
from paddock.sandbox.network.policy import NetworkPolicy


@pytest.mark.parametrize(
    "text",
    [
        *["127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "::", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1"],
        *[
            "168.63.129.16",
            "192.0.0.192",
            "169.254.169.254",
            "169.254.1.1",
            "fe80::1",
            "fd00:ec2::254",
            "fc00::1",
            "224.0.0.1",
            "ff02::1",
        ],
        *["255.255.255.255", "240.0.0.1", "198.18.0.1", "203.0.113.80", "192.0.0.1", "192.88.99.1"],
        *["::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"],
        *["2002:7f00:1::1", "2002:a00:1::", "2001:0:0:0:0:0:80ff:fffe", "2001:db8::1", "::127.0.0.1"],
    ],
)
def test_special_addresses_are_not_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert describe_special(address) is not None


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_other_addresses_are_public(text: str) -> None:
    assert describe_special(ipaddress.ip_address(text)) is None


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.ORG.", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("[::1]", "::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("_sip.example.org", "_sip.example.org"),
    ],
)
def test_hosts_have_one_form(text: str, host: str) -> None:
    assert normalize_host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        *["0177.0.0.1", "2130706433", "0x7f000001", "127.1", "0x7f.1", "1.2.3.4.5", "", ".", "a..b", "a b"],
        *[
            "user@host",
            "a/b",
            "-a.example",
            "a" * 64 + ".org",
            "x." * 130 + "org",
            "[::1",
            "exa\u2024mple\u2100.org",
            "a\r\nb",
        ],
    ],
)
def test_odd_forms_are_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        normalize_host(text)


def test_a_list_matches_names_wildcards_and_ranges() -> None:
    rules = HostRules.parse(["Example.org", "*.example.net", "10.1.0.0/16", "192.0.2.7", "registries"])
    assert rules.match_name("example.org")
    assert rules.match_name("a.b.example.net")
    assert not any(
        map(rules.match_name, ("www.example.org", "example.net", "badexample.net", "example.org.evil.com"))
    )
    assert rules.match_address(ipaddress.ip_address("10.1.255.1"))
    assert rules.match_address(ipaddress.ip_address("192.0.2.7"))
    assert not rules.match_address(ipaddress.ip_address("10.2.0.1"))
    assert rules.has_registries


WRONG_ENTRIES = ("*", "*.1.2.3.4", "http://example.org", "10.1.2.3/8", "a:80", "")


@pytest.mark.parametrize("entry", ["[2001:db8::7]", "2001:db8::7", "2001:DB8::/64"])
def test_an_address_matches_in_all_its_forms(entry: str) -> None:
    assert HostRules.parse([entry]).match_address(ipaddress.ip_address("2001:db8::7"))


@pytest.mark.parametrize("entry", [*WRONG_ENTRIES, "*.*.org", "::ffff:10.0.0.0/104"])
def test_a_wrong_entry_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts") as caught:
        NetworkPolicy("allowlist", (entry,))
    assert repr(entry) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("public", NetworkPolicy("public")),
        ("allowlist", NetworkPolicy("allowlist", ("registries",))),
        ("allowlist:registries,*.example.org", NetworkPolicy("allowlist", ("registries", "*.example.org"))),
    ],
)
def test_a_policy_has_a_short_form(text: str, policy: NetworkPolicy) -> None:
    assert NetworkPolicy.parse(text) == policy
    assert NetworkPolicy.parse(str(policy)) == policy


@pytest.mark.parametrize("text", ["pubic", "", "allowlist:", "public:example.org", "allowlist:http://a.example"])
def test_a_wrong_policy_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NetworkPolicy.parse(text)
    assert repr(text.removeprefix("allowlist:") or text) in caught.value.message
    assert "registries" in (caught.value.hint or "")
