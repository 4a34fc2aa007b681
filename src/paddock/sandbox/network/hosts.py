"""The entries of `allowed_hosts`, parsed: names, wildcards, addresses and address ranges. Does no IO."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import idna

from paddock.errors import ConfigError
from paddock.sandbox.network.addresses import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.sandbox.network.addresses import Address, Network

REGISTRIES = "registries"
"""An allowed host of this name stands for the package registries that this machine is configured for."""
WILDCARD = "*."
LONGEST_NAME = 253
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as IPv6. Addresses are compared as IPv4, so a range of these would match nothing."""
NUMBER_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
ENTRY_HINT = "use a host name, *.NAME, an address, an address range such as 10.1.0.0/16, or registries"


def normalize_host(text: str) -> str:
    """A host name in lower-case ASCII without its trailing dot, or a canonical address.

    Raises ValueError with the reason. Forms of an address that only some programs understand (`0177.0.0.1`, `127.1`,
    `2130706433`) are no names either: they would be resolved to an address.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = parse_address(bare.partition("%")[0])
    if address is not None:
        return str(address)
    name = text.removesuffix(".")
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True, std3_rules=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"it is no host name: {error}") from None
    name = name.lower()
    labels = name.split(".")
    if len(name) > LONGEST_NAME or not all(LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is neither a host name nor an address")
    if NUMBER_LABEL.fullmatch(labels[-1]):
        raise ValueError("it is no address in the usual form, such as 192.0.2.1")
    return name


@dataclass(frozen=True, slots=True)
class HostRules:
    """What a list of allowed hosts matches."""

    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    """`.example.org` for `*.example.org`, which stands for every name below it, but not for example.org itself."""
    networks: tuple[Network, ...] = ()
    has_registries: bool = False

    @classmethod
    def parse(cls, entries: Iterable[str]) -> HostRules:
        """Raises ConfigError that names the entry."""
        names, suffixes, networks = set(), [], []
        entries = tuple(entries)
        for entry in entries:
            if entry == REGISTRIES:
                continue
            try:
                if entry.startswith(WILDCARD):
                    suffixes.append(f".{_parse_suffix(entry)}")
                elif (network := _parse_network(entry)) is not None:
                    networks.append(network)
                else:
                    names.add(normalize_host(entry))
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"allowed_hosts has {entry!r}: {error}", hint=ENTRY_HINT) from None
        return cls(frozenset(names), tuple(suffixes), tuple(networks), REGISTRIES in entries)

    def match_name(self, name: str) -> bool:
        return name in self.names or name.endswith(self.suffixes)

    def match_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _parse_suffix(entry: str) -> str:
    name = normalize_host(entry.removeprefix(WILDCARD))
    if parse_address(name) is not None:
        raise ValueError("an address has no subdomains")
    return name


def _parse_network(entry: str) -> Network | None:
    """A single address is a range of one. None if the entry is a name."""
    text, separator, _ = entry.partition("/")
    address = parse_address(text.removeprefix("[").removesuffix("]"))
    if address is None:
        return None
    if not separator:
        return ipaddress.ip_network(address)
    network = ipaddress.ip_network(entry)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        raise ValueError("write it as a range of IPv4 addresses")
    return network
