"""How a reducer is to work: a checked value, and the policy that it picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import LayoutError, ReduceError, check_integer
from .policies import Arrival, Planned

if TYPE_CHECKING:
    from .layout import BucketLayout
    from .policies import Policy
    from .protocols import Memory, Op
    from .registry import Registry

__all__ = ["Options"]

MOST_BUFFERS = 1 << 10

_CHOICES = {
    "op": ("mean", "sum"),
    "policy": ("planned", "arrival"),
    "pre_divide": (True, False),
    "missing": ("zero", "error"),
    "memory": ("device", "pinned"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of Reducer, checked. Raises LayoutError for one that cannot work."""

    op: str
    policy: str
    pre_divide: bool
    max_buffers: int
    missing: str
    memory: Memory

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                msg = f"{key} must be one of {choices}, not {value!r}"
                raise LayoutError(msg)
        check_integer("max_buffers", self.max_buffers, 1)
        if self.policy == "arrival" and self.max_buffers > MOST_BUFFERS:
            # Planned buckets have a buffer each at most; those that fill as they come, no bound.
            msg = f"max_buffers of policy='arrival' is at most {MOST_BUFFERS}: {self.max_buffers}"
            raise LayoutError(msg)
        if not self.pre_divide and (self.op, self.policy) != ("mean", "arrival"):
            msg = "pre_divide=False needs op='mean' and policy='arrival'"
            raise LayoutError(msg)

    @classmethod
    def agreed(cls, registry: Registry, **values: Any) -> Options:
        """Collective, blocks the host: return options that every rank has given alike.

        A rank that gives bad ones raises its own error; the others a MismatchError that shows it.
        """
        registry.world.check()
        refused: ReduceError | None = None
        entries: list[str] = []
        try:
            options = cls(**values)
            options.check_params(registry)
            registry.check_free()
            entries = [repr(options)]
        except ReduceError as error:
            refused = error
        registry.world.agree("the reducer's options", entries, refused=refused)
        return options

    @property
    def pack_divides(self) -> bool:
        """Whether pack divides by world_size, so that the collective is a plain sum."""
        return self.op == "mean" and self.pre_divide

    @property
    def collective_op(self) -> Op:
        """What the reduce-scatter does."""
        return "sum" if self.op == "sum" or self.pre_divide else "avg"

    @property
    def direct_op(self) -> Op:
        """What the reduce-scatter of a gradient does that is sent from where it lies, undivided."""
        return "sum" if self.op == "sum" else "avg"

    def allows_direct(self, world_size: int) -> bool:
        """Whether such a gradient gives the bits that packing it would: dividing then is exact.

        (Not below the smallest normal number, where packing a 16-bit one may round twice.)
        """
        return self.op == "sum" or world_size & (world_size - 1) == 0

    def check_params(self, registry: Registry) -> None:
        """Raise LayoutError for parameters that these options cannot reduce."""
        for spec in registry.params:
            if self.op == "mean" and not spec.is_float:
                msg = f"op='mean' cannot divide integers ({spec.name!r}); use op='sum'"
                raise LayoutError(msg)

    def build_policy(self, registry: Registry) -> Policy:
        """Return the policy object for the registry's buckets."""

        def straight(layout: BucketLayout) -> bool:
            return layout.reduce_dtype == layout.shard_dtype and registry.owns(layout)

        world_size = registry.world.world_size
        if self.policy == "planned":
            return Planned(
                registry.buckets,
                straight=straight,
                world_size=world_size,
                max_buffers=self.max_buffers,
                direct=self.allows_direct(world_size),
            )
        return Arrival(
            registry.buckets,
            straight=straight,
            world_size=world_size,
            max_buffers=self.max_buffers,
            bucket_bytes=registry.bucket_bytes,
        )
