"""Which IP addresses are public, and what the others are. Knows no policy."""

from __future__ import annotations

import ipaddress
import socket
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
NAT64 = ipaddress.ip_network("64:ff9b::/96")
METADATA = tuple(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "fd00:ec2::254", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
    )
)
"""Where cloud machines read their own credentials. Some of these addresses look public."""
RELAYS_4 = ipaddress.ip_network("192.88.99.0/24")
"""Relays from IPv4 to IPv6, deprecated. The standard library counts them as public."""


def parse_address(text: str) -> Address | None:
    """The address that a text is, an IPv4-mapped one as IPv4. None for anything else, such as `0177.0.0.1`."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def describe_special(address: Address) -> str | None:
    """What kind of address it is, such as `a loopback address`. None for one that is public."""
    kinds = {
        "the metadata service of a cloud": address in METADATA,
        "an unspecified address": address.is_unspecified,
        "a loopback address": address.is_loopback,
        "a link-local address": address.is_link_local,
        "a multicast address": address.is_multicast,
        "a private address": address.is_private,
        "a reserved address": not is_global(address),
        "an address of this machine": is_own(address),
    }
    return next((kind for kind, is_kind in kinds.items() if is_kind), None)


def is_global(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_reserved and address not in RELAYS_4
    embedded = embedded_address(address)
    if embedded is not None:
        return is_global(embedded) and not embedded.is_multicast
    return address in GLOBAL_UNICAST and address.is_global


def embedded_address(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a translator would send packets for this one to."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else None


def is_own(address: Address) -> bool:
    """Whether it is an address of this machine: only those can be bound."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except (OSError, OverflowError):
        return False
    return True
