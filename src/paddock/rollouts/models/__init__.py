"""Models: from what a user writes to a live endpoint."""

from paddock.rollouts.models.catalog import open_model
from paddock.rollouts.models.endpoint import Endpoint

__all__ = ["Endpoint", "open_model"]
