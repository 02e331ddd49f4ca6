"""The parameter side of ZeRO-3: full parameters from shards, only while somebody uses them."""

from .gatherer import Gatherer
from .statistics import GathererStatistics

__all__ = ["Gatherer", "GathererStatistics"]
