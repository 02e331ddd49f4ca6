"""The torch adapter: hooks hand gradients over, shards are torch parameters. No engine here."""

from .attachment import attach
from .sharded import Sharded

__all__ = ["Sharded", "attach"]
