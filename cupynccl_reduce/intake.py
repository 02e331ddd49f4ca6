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

    def __init__(self, params: Iterable[ParamSpec], read: Callable[[Any], View]) -> None:
        self._specs = {spec.name: spec for spec in params}
        self._read = read
        self._held: dict[str, list[View]] = {}
        self.count = 0  # gradients ever held

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

    def check(self, name: str, grad: Any) -> View:
        """Return the view of a gradient that may be handed over; hold nothing yet."""
        view = self._read(grad)
        spec = self._specs[name]
        if view.shape != spec.shape or view.dtype != spec.dtype:
            msg = f"the gradient is {view.dtype} {view.shape}; hand over what is registered"
            raise GradientError(msg)
        return view

    def hold(self, name: str, view: View) -> None:
        """Keep one checked gradient until `take`; its memory must not go away before that."""
        self._held.setdefault(name, []).append(view)
        self.count += 1

    def held(self, layout: BucketLayout) -> list[Sequence[View]]:
        """Return the sources of each segment; none where nothing arrived."""
        return [self._held.get(name, ()) for name in layout.names]

    def take(self, layout: BucketLayout) -> list[Sequence[View]]:
        """Return the sources of each segment, which the caller holds from now on."""
        return [self._held.pop(name, ()) for name in layout.names]

    def clear(self) -> None:
        """Drop everything held."""
        self._held.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of which something is held."""
        return tuple(self._held)

    def describe(self, name: str) -> str:
        """Return how an error names a parameter: with dtype and shape where registered."""
        if not isinstance(name, str):
            return f"parameter named by a {type(name).__name__}"
        spec = self._specs.get(name)
        return f"parameter {name!r}" + (f" {spec.dtype} {spec.shape}" if spec else "")
