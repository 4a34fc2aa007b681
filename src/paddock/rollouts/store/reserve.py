"""A little disk space set aside, so that an outcome can still be written when the disk is full."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RESERVE_BYTES = 1024 * 1024
_ROOM = 16
"""The reserve is taken only while the disk has this many times its size."""

logger = logging.getLogger(__name__)


class Reserve:
    """The file `reserve` of a store."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reserve"

    def take(self) -> bool:
        """Set the space aside unless it is already; False if there is too little."""
        try:
            if self.path.exists():
                return True
            if shutil.disk_usage(self.path.parent).free < _ROOM * RESERVE_BYTES:
                return False
            # Bytes are really written: a hole in a file reserves nothing.
            building = self.path.with_name(f"reserve.{os.getpid()}")
            try:
                building.write_bytes(os.urandom(RESERVE_BYTES))
                building.replace(self.path)
            finally:
                building.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("no space was set aside at %s: %s", self.path, error)
            return False
        return True

    def free(self) -> bool:
        """Give the space back to the disk; False if it was gone already."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        logger.warning("the disk is full: the reserve at %s was used", self.path)
        return True
