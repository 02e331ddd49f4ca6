"""Gradients handed over and not yet launched: checked against the registry, and held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .dlpack import View
    from .layout import BucketLayout, ParamSpec

__all__ = ["Intake"]


class Intake:
    """Holds, by name, the sources that the next pack of each parameter reads."""

    def __init__(
        self,
        params: Iterable[ParamSpec],
        reader: Callable[[tuple[int, ...], str], Callable[[Any], View]],
    ) -> None:
        self._specs = {spec.name: spec for spec in params}
        kinds = {(spec.shape, spec.dtype) for spec in self._specs.values()}
        readers = {kind: reader(*kind) for kind in kinds}
        self._readers = {n: readers[s.shape, s.dtype] for n, s in self._specs.items()}
        self._held: dict[str, list[View]] = {name: [] for name in self._specs}
        self._taken = 0

    def check_name(self, name: str) -> None:
        """Raise GradientError for a name that is not registered."""
        try:
            known = name in self._specs
        except TypeError:  # not hashable, such as the gradient itself
            msg = "the name comes first, as a string, and the gradient second"
            raise GradientError(msg) from None
        if not known:
            msg = (
                f"not among the {len(self._specs)} of the registry; build a new registry that "
                "holds it (one that was frozen before needs that too)"
            )
            raise GradientError(msg)

    def reader(self, name: str) -> Callable[[Any], View]:
        """Return what checks and describes a gradient of `name`; see protocols.Runtime.reader."""
        try:
            return self._readers[name]
        except (KeyError, TypeError):  # the latter for what cannot be a name at all
            self.check_name(name)
            raise

    def hold(self, name: str, view: View) -> None:
        """Keep one checked gradient until `take`; its memory must not go away before that."""
        self._held[name].append(view)

    def held(self, layout: BucketLayout) -> list[Sequence[View]]:
        """Return the sources of each segment; none where nothing arrived."""
        return [self._held[name] for name in layout.names]

    def take(self, layout: BucketLayout) -> list[Sequence[View]]:
        """Return the sources of each segment, which the caller holds from now on."""
        groups: list[Sequence[View]] = []
        for name in layout.names:
            group = self._held[name]
            if group:
                self._held[name] = []
                self._taken += len(group)
            groups.append(group or ())  # an empty one stays here, and fills in the next backward
        return groups

    def clear(self) -> None:
        """Drop everything held."""
        for name in self.names:
            self._taken += len(self._held[name])
            self._held[name] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of which something is held."""
        return tuple(name for name, group in self._held.items() if group)

    @property
    def count(self) -> int:
        """Gradients ever held."""
        return self._taken + sum(map(len, self._held.values()))

    def describe(self, name: str) -> str:
        """Return how an error names a parameter: with dtype and shape where registered."""
        if not isinstance(name, str):
            return f"parameter named by a {type(name).__name__}"
        spec = self._specs.get(name)
        return f"parameter {name!r}" + (f" {spec.dtype} {spec.shape}" if spec else "")
