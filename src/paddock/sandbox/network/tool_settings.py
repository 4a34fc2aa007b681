"""Environment variables that tell the programs in a sandbox about its proxy, registries and certificates.

Variables only: a file in the root would end up in an image that is built there. They hold no secret.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.sandbox.network.machine_settings import MachineSettings

CERTIFICATES = PurePosixPath("/run/paddock/ca.crt")
EXTRA_CERTIFICATES = PurePosixPath("/run/paddock/extra-ca.crt")
"""Where the certificates of this machine are mounted, read-only."""
DIRECT_HOSTS = "localhost,127.0.0.1,::1,0.0.0.0,sandbox"
"""Services inside, and the model, are reached without the proxy."""
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
JAVA_OPTIONS = ("MAVEN_OPTS", "GRADLE_OPTS")
"""Options that are added to those of the image."""
BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
)


def proxy_variables(port: int) -> dict[str, str]:
    """For curl, wget, git, apt, pip, uv, npm and most other programs. The proxy listens inside on this port."""
    url = f"http://127.0.0.1:{port}"
    variables = dict.fromkeys(PROXY_VARIABLES, url)
    variables |= {"no_proxy": DIRECT_HOSTS, "NO_PROXY": DIRECT_HOSTS}
    # npm and Node's fetch do not read the variables above in every version, Java reads none of them.
    variables |= {"npm_config_proxy": url, "npm_config_https_proxy": url, "NODE_USE_ENV_PROXY": "1"}
    java = " ".join(f"-D{name}.proxyHost=127.0.0.1 -D{name}.proxyPort={port}" for name in ("http", "https"))
    return variables | dict.fromkeys(JAVA_OPTIONS, java)


def registry_variables(settings: MachineSettings) -> dict[str, str]:
    """Indexes and registries of this machine, as far as they are not the tools' own."""
    variables = {
        "PIP_INDEX_URL": settings.pip_index,
        "PIP_EXTRA_INDEX_URL": " ".join(settings.pip_extra_indexes),
        "PIP_TRUSTED_HOST": " ".join(settings.pip_trusted_hosts),
        "UV_DEFAULT_INDEX": settings.uv_index,
        "UV_INDEX": " ".join(settings.uv_extra_indexes),
        "npm_config_registry": settings.npm_registry,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_update_notifier": "false",
    }
    return {name: value for name, value in variables.items() if value}


def certificate_variables(settings: MachineSettings) -> dict[str, str]:
    variables: dict[str, str] = {}
    if settings.certificates is not None:
        variables = dict.fromkeys(BUNDLE_VARIABLES, str(CERTIFICATES))
    if settings.extra_certificates is not None:
        variables["NODE_EXTRA_CA_CERTS"] = str(EXTRA_CERTIFICATES)
    return variables
