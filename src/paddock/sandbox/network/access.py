"""Decides whether a connection may be opened, and to which addresses. Resolves names, but connects nowhere.

The addresses that were checked are the ones to connect to: a name is not resolved again after the decision, so its
owner cannot point it to another address in between (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from paddock.sandbox.network.addresses import describe_special, parse_address
from paddock.sandbox.network.hosts import HostRules, normalize_host
from paddock.sandbox.network.registries import Registries, machine_registries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.sandbox.network.addresses import Address
    from paddock.sandbox.network.policy import NetworkPolicy

    Resolve = Callable[[str], Awaitable[tuple[Address, ...]]]

RESOLVE_SECONDS = 15.0
RESOLVED_SECONDS = 60.0
"""How long the addresses of a name are used again."""
MOST_RESOLVED_NAMES = 1000
MOST_LOOKUPS = 4
"""Names that one sandbox may have looked up at a time."""
LOOKUP_THREADS = ThreadPoolExecutor(max_workers=32, thread_name_prefix="paddock-lookup")
"""A lookup cannot be cancelled, and a name server may not answer: the threads of everything else must stay free."""
HIGHEST_PORT = 65535
UNLISTED = "neither {} nor an address of it is in allowed_hosts"
FORBIDDEN, BAD_REQUEST, BAD_GATEWAY, GATEWAY_TIMEOUT, UNAVAILABLE = 403, 400, 502, 504, 503


class ConnectionRefusal(Exception):
    """Why a connection is not opened."""

    def __init__(self, reason: str, *, status: int = FORBIDDEN, entry: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.entry = entry
        """What would allow it in `allowed_hosts`; nothing if the list does not decide."""

    @property
    def is_failure(self) -> bool:
        """Whether the policy allowed the connection, but it could not be opened."""
        return self.status in (BAD_GATEWAY, GATEWAY_TIMEOUT)

    def describe(self, host: str, port: int, policy: NetworkPolicy, phase: str) -> str:
        """What the program inside reads, and with it the agent."""
        subject = f"the connection to {host}:{port}" if host else "the request"
        stage = f" of the phase {phase}" if phase else ""
        lines = [f"Paddock did not open {subject}: {self.reason}.", f"The network policy{stage} is {policy}."]
        if self.entry:
            table = phase if phase in ("agent", "verifier") else "environment"
            lines.append(
                f'The author of the task can allow it in task.toml: network_mode = "allowlist" and "{self.entry}" in '
                f"allowed_hosts, in the table [{table}]."
            )
        if self.entry and phase == "agent":
            entries = ",".join((*policy.allowed_hosts, self.entry))
            lines.append(f"Whoever starts the rollout can allow it with --network allowlist:{entries}.")
        return "\n".join(lines) + "\n"


class AccessRules:
    """The rules of one policy on this machine."""

    def __init__(
        self, policy: NetworkPolicy, *, registries: Registries | None = None, resolve: Resolve | None = None
    ) -> None:
        self.policy = policy
        self._hosts = HostRules.parse(policy.allowed_hosts)
        self._registries = registries or machine_registries()
        self._resolve = resolve or resolve_name
        self._resolved: dict[str, tuple[float, tuple[Address, ...]]] = {}
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)

    async def admit(self, host: str, port: int, *, must_resolve: bool = True) -> tuple[Address, ...]:
        """The addresses that may be connected to. Raises ConnectionRefusal.

        Without `must_resolve`, another proxy resolves the names, so a name that does not resolve here is no failure.
        """
        if not 0 < port <= HIGHEST_PORT:
            raise ConnectionRefusal(f"{port} is no port", status=BAD_REQUEST)
        try:
            name = normalize_host(host)
        except ValueError as error:
            raise ConnectionRefusal(f"{host[:80]!r} cannot be connected to: {error}", status=BAD_REQUEST) from None
        if self.policy.mode == "no-network":
            raise ConnectionRefusal("this phase has no network", entry=name)
        address = parse_address(name)
        if address is not None:
            return await self._admit_addresses(name, port, (address,), is_listed=self.policy.mode == "public")
        is_listed = self.policy.mode == "public" or self._hosts.match_name(name)
        is_allowed = is_listed or (self._hosts.has_registries and await self._registries.contains(name, port))
        if not is_allowed and not self._hosts.networks:
            raise ConnectionRefusal(f"{name} is not in allowed_hosts", entry=name)
        try:
            addresses = await self._resolve_once(name)
        except ConnectionRefusal:
            if not is_allowed:
                # The reason must not tell what a name server answered about a name that is not allowed.
                raise ConnectionRefusal(UNLISTED.format(name), entry=name) from None
            if must_resolve:
                raise
            return ()
        return await self._admit_addresses(name, port, addresses, is_listed=is_listed)

    async def _admit_addresses(
        self, name: str, port: int, addresses: tuple[Address, ...], *, is_listed: bool
    ) -> tuple[Address, ...]:
        kinds = {address: describe_special(address) for address in addresses}
        admitted = tuple(
            address
            for address, special in kinds.items()
            if self._hosts.match_address(address) or (is_listed and special is None)
        )
        if admitted:
            return admitted
        if (is_listed or self._hosts.has_registries) and await self._registries.contains(name, port):
            # The settings of this machine vouch for its registries, which may be mirrors with private addresses.
            return addresses
        address, special = next(iter(kinds.items()))
        if str(address) == name:
            reason = f"{name} is {special}" if special else f"{name} is not in allowed_hosts"
            raise ConnectionRefusal(reason, entry=name)
        if is_listed:
            reason = f"{name} resolves to {address}, {special}, which is not in allowed_hosts"
            raise ConnectionRefusal(reason, entry=str(address))
        raise ConnectionRefusal(UNLISTED.format(name), entry=name)

    async def _resolve_once(self, name: str) -> tuple[Address, ...]:
        until, addresses = self._resolved.get(name, (0.0, ()))
        if time.monotonic() < until:
            return addresses
        try:
            async with asyncio.timeout(RESOLVE_SECONDS), self._lookups:
                addresses = await self._resolve(name)
        except TimeoutError:
            raise ConnectionRefusal(f"{name} did not resolve in time", status=GATEWAY_TIMEOUT) from None
        except OSError as error:
            reason = f"{name} does not resolve: {error.strerror or error}"
            raise ConnectionRefusal(reason, status=BAD_GATEWAY) from None
        if not addresses:
            raise ConnectionRefusal(f"{name} has no address", status=BAD_GATEWAY)
        if len(self._resolved) >= MOST_RESOLVED_NAMES:
            self._resolved.clear()
        self._resolved[name] = (time.monotonic() + RESOLVED_SECONDS, addresses)
        return addresses


async def resolve_name(name: str) -> tuple[Address, ...]:
    """Its addresses, as this machine resolves it. Raises OSError."""
    loop = asyncio.get_running_loop()
    infos = await loop.run_in_executor(
        LOOKUP_THREADS, partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    )
    parsed = (parse_address(str(info[4][0]).partition("%")[0]) for info in infos)
    return tuple(dict.fromkeys(address for address in parsed if address is not None))
