"""When a bucket is launched, and what its launch holds: one module per policy.

Both emit the same `Launch` values; the pipeline that runs them does not know which made one.
"""

from .arrival import Arrival
from .base import Policy
from .planned import Planned

__all__ = ["Arrival", "Planned", "Policy"]
