"""Models: from what a user writes to a live endpoint."""

from paddock.models.catalog import open_model
from paddock.models.endpoint import Endpoint

__all__ = ["Endpoint", "open_model"]
