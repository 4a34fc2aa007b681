"""Which hosts a sandbox may connect to, as a value. The egress proxy enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from paddock.errors import ConfigError
from paddock.sandbox.network.hosts import REGISTRIES as REGISTRIES
from paddock.sandbox.network.hosts import HostRules

NetworkMode = Literal["no-network", "allowlist", "public"]
NETWORK_MODES: tuple[NetworkMode, ...] = get_args(NetworkMode)
LIST_SEPARATOR = ":"
POLICY_HINT = "write no-network, allowlist:registries,example.org or public"


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """`public` allows every public address, `allowlist` the hosts in the list only, `no-network` none."""

    mode: NetworkMode = "no-network"
    allowed_hosts: tuple[str, ...] = ()
    """Host names, `*.` wildcards, addresses, address ranges (CIDR), or `registries`."""

    def __post_init__(self) -> None:
        if self.mode not in NETWORK_MODES:
            raise ConfigError(f"network_mode is {self.mode!r}", hint=f"use {', '.join(NETWORK_MODES)}")
        if self.allowed_hosts and self.mode != "allowlist":
            raise ConfigError(
                f"allowed_hosts is given, but network_mode is {self.mode!r}",
                hint="use network_mode 'allowlist', or leave allowed_hosts out",
            )
        HostRules.parse(self.allowed_hosts)

    @classmethod
    def parse(cls, text: str) -> NetworkPolicy:
        """The policy that a text such as `public` or `allowlist:registries,*.example.org` stands for.

        `allowlist` alone allows the package registries. Raises ConfigError."""
        mode, separator, hosts = text.strip().partition(LIST_SEPARATOR)
        if mode not in NETWORK_MODES or (separator and mode != "allowlist"):
            raise ConfigError(f"network is {text!r}", hint=POLICY_HINT)
        entries = tuple(host.strip() for host in hosts.split(",") if host.strip())
        if separator and not entries:
            raise ConfigError(f"network is {text!r}, without hosts", hint=POLICY_HINT)
        if mode == "allowlist" and not separator:
            entries = (REGISTRIES,)
        return cls(mode, entries)

    def __str__(self) -> str:
        """The form that `parse` reads."""
        return f"{self.mode}{LIST_SEPARATOR}{','.join(self.allowed_hosts)}" if self.allowed_hosts else self.mode


NO_NETWORK = NetworkPolicy()
