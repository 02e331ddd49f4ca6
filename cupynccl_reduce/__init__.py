"""Gradients in, reduced ZeRO shards out, while backward is still running.

CuPy owns streams, events and memory, NCCL moves the bytes, DLPack brings gradients in from any
framework. Importing this package loads no array library; `connect()` picks one.
"""

from .checkpoint import load, save
from .errors import (
    CheckpointError,
    CommunicationError,
    GradientError,
    GradientTypeError,
    LayoutError,
    MismatchError,
    ProtocolError,
    ReduceError,
)
from .gatherer import Gatherer, GathererStatistics
from .layout import BucketLayout, ParamSpec, Segment, plan_buckets
from .membership import World
from .reducer import Reducer
from .registry import Placement, Registry
from .statistics import Statistics
from .world import connect, run_local

__version__ = "0.1.0"

__all__ = [
    "BucketLayout",
    "CheckpointError",
    "CommunicationError",
    "Gatherer",
    "GathererStatistics",
    "GradientError",
    "GradientTypeError",
    "LayoutError",
    "MismatchError",
    "ParamSpec",
    "Placement",
    "ProtocolError",
    "ReduceError",
    "Reducer",
    "Registry",
    "Segment",
    "Statistics",
    "World",
    "connect",
    "load",
    "plan_buckets",
    "run_local",
    "save",
]
