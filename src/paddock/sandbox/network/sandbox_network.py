"""The network of one sandbox: its egress proxy, the ports inside that lead to it, and what its commands are told."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.sandbox.base import Mount
from paddock.sandbox.network.egress import EgressProxy
from paddock.sandbox.network.registries import machine_registries
from paddock.sandbox.network.tool_settings import (
    CERTIFICATES,
    EXTRA_CERTIFICATES,
    certificate_variables,
    proxy_variables,
    registry_variables,
)

if TYPE_CHECKING:
    from paddock.sandbox.base import Sandbox, SandboxSpec
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.sandbox.network.registries import Registries

logger = logging.getLogger(__name__)

PROXY_PORT = 7001
"""Of the egress proxy inside every sandbox with a network."""


class SandboxNetwork:
    """Made by `start`. Ends with `close`."""

    def __init__(self, proxy: EgressProxy, env: dict[str, str]) -> None:
        self.proxy = proxy
        self.env = env
        """Variables for every command."""

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        policy: NetworkPolicy,
        phase: str,
        *,
        has_certificates: bool,
        registries: Registries | None = None,
    ) -> SandboxNetwork:
        """Listen inside, and serve. `has_certificates` tells whether `add_certificates` was applied to the spec."""
        if registries is None:
            registries = await asyncio.to_thread(machine_registries)
        proxy = EgressProxy(policy, phase=phase, registries=registries)
        settings = registries.settings
        try:
            listener, port = await sandbox.expose(PROXY_PORT)
            await proxy.serve(listener)
            if sandbox.isolates:
                # A registry on the loopback interface of the host gets the same port on that of the sandbox.
                for registry_port in registries.loopback_ports:
                    await _serve_registry(sandbox, proxy, registry_port)
        except BaseException:
            await proxy.close()
            raise
        certificates = certificate_variables(settings) if has_certificates else {}
        return cls(proxy, {**proxy_variables(port), **registry_variables(settings), **certificates})


async def _serve_registry(sandbox: Sandbox, proxy: EgressProxy, port: int) -> None:
    try:
        listener, _ = await sandbox.expose(port)
    except SandboxError as error:
        # Ports below 1024 are only for root, and a program inside may use the port already.
        logger.warning("the registry at port %d of this host cannot be reached inside: %s", port, error)
        return
    await proxy.serve_port(listener, "127.0.0.1", port)


def add_certificates(spec: SandboxSpec) -> SandboxSpec:
    """Mount the certificates that this machine is configured to trust, if the sandbox has a network."""
    if spec.network.mode == "no-network":
        return spec
    settings = machine_registries().settings
    sources = ((settings.certificates, CERTIFICATES), (settings.extra_certificates, EXTRA_CERTIFICATES))
    mounts = tuple(Mount(source.resolve(), target) for source, target in sources if source is not None)
    return replace(spec, mounts=(*spec.mounts, *mounts))
