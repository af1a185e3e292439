"""Commands of the system that a test needs: where one is missing the test is skipped, and says which."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.config.endpoint import Certificates
from paceline.network.secure.tls import generated

_SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"  # where daemons lie, which are not on every user's PATH


def need(packages: dict[str, str], what: str) -> None:
    """Skip the test unless every command is there. `packages`: command -> the package that has it."""
    for command, package in packages.items():
        if found(command) is None:
            pytest.skip(f"{what}: {package} is not installed ({command} is missing)")


def found(command: str) -> str | None:
    """Where a command lies. On a PATH without any folder of the system no command of the system is to be used."""
    path = os.environ.get("PATH", "")
    shown = {"/usr/bin", "/bin", "/usr/local/bin"} & set(path.split(os.pathsep))
    return shutil.which(command, path=f"{path}{os.pathsep}{_SYSTEM}" if shown else path)


def certificates(folder: Path) -> Certificates:
    """Certificates of one's own, which openssl makes."""
    need({"openssl": "openssl"}, "certificates")
    return generated(folder)
