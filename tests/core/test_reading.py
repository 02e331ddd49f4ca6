"""The quick way of reading a gradient that is as the last one was, and all that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from cupynccl_reduce import GradientError, GradientTypeError, dlpack
from cupynccl_reduce.reading import make_reader

if TYPE_CHECKING:
    from cupynccl_reduce.view import View

SHAPE = (4, 6)


class Reads:
    """A runtime's `read`, counted; the stream is whatever `stream` is."""

    def __init__(self, stream: Any = "stream") -> None:
        self.count = 0
        self.stream = stream

    def __call__(self, source: Any) -> View:
        self.count += 1
        view = dlpack.read(source)
        view.stream = "read"
        return view

    def follow(self) -> Any:
        return lambda: self.stream


def gradient() -> torch.Tensor:
    return torch.randn(SHAPE)


def test_a_tensor_like_the_last_is_described_without_an_export() -> None:
    read = Reads()
    reader = make_reader(read, SHAPE, "float32", read.follow)
    first, second = gradient(), gradient()
    assert reader(first).stream == "read"
    quick = reader(second)
    assert read.count == 1
    slow = read(second)
    slow.stream = "stream"
    assert quick == slow
    assert quick.owner is second


def test_there_is_no_quick_way_without_a_stream_to_follow() -> None:
    read = Reads(stream=None)
    for reader in (
        make_reader(read, SHAPE, "float32", read.follow),
        make_reader(read, SHAPE, "float32"),
    ):
        read.count = 0
        for number in range(1, 4):
            assert reader(gradient()).stream == "read"
            assert read.count == number


class Subclass(torch.Tensor):
    """Another type: what it holds is its own affair."""


def wide() -> torch.Tensor:
    return torch.randn(4, 12)[:, ::2]


@pytest.mark.parametrize(
    "other",
    [
        wide,
        lambda: torch.randn(6, 4).T,
        lambda: torch.randn(1, 6).expand(SHAPE),
        lambda: torch._neg_view(gradient()),
        lambda: gradient().as_subclass(Subclass),
        lambda: gradient().numpy(),
    ],
    ids=["strided", "transposed", "expanded", "negative", "subclass", "numpy"],
)
def test_what_differs_is_read_anew_and_right(other: Any) -> None:
    read = Reads()
    reader = make_reader(read, SHAPE, "float32", read.follow)
    reader(gradient())
    source = other()
    view = reader(source)
    assert read.count == 2
    expected = dlpack.read(source)
    assert (view.shape, view.strides, view.dtype) == (SHAPE, expected.strides, "float32")
    reader(gradient())  # and the next plain one is quick again, whatever came between
    reader(gradient())
    assert read.count in (2, 3)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("other", "error"),
    [
        (lambda: torch.randn(6, 4), GradientError),
        (lambda: torch.randn(24), GradientError),
        (lambda: torch.randn(SHAPE, dtype=torch.float64), GradientError),
        (lambda: torch.randn(SHAPE, requires_grad=True), GradientError),
        (lambda: torch.empty(SHAPE, device="meta"), GradientTypeError),
        (lambda: torch.sparse_coo_tensor(size=SHAPE), GradientTypeError),
        (lambda: torch.eye(4, 6).to_sparse_csr(), GradientTypeError),
        (lambda: 3.0, GradientTypeError),
    ],
    ids=["shape", "flat", "dtype", "requires-grad", "meta", "sparse", "sparse-csr", "number"],
)
def test_what_is_no_such_gradient_is_refused_after_a_good_one_too(other: Any, error: type) -> None:
    read = Reads()
    reader = make_reader(read, SHAPE, "float32", read.follow)
    for _ in range(2):
        with pytest.raises(error):
            reader(other())
        reader(gradient())


def test_a_transform_of_torch_that_has_no_memory_is_refused() -> None:
    read = Reads()
    reader = make_reader(read, SHAPE, "float32", read.follow)
    reader(gradient())
    caught = []

    def transformed(x: torch.Tensor) -> torch.Tensor:
        try:
            reader(x)
        except GradientTypeError as error:
            caught.append(error)
        return x.sum()

    torch.vmap(transformed)(torch.randn(3, *SHAPE))
    assert len(caught) == 1


def test_an_empty_gradient_is_read_each_time() -> None:
    read = Reads()
    reader = make_reader(read, (0, 6), "float32", read.follow)
    for number in range(1, 3):
        assert reader(torch.empty(0, 6)).shape == (0, 6)
        assert read.count == number


def test_a_voucher_is_known_whole_or_not_at_all() -> None:
    """Ctrl-C, or another thread, while torch's stream is looked for."""
    read = Reads()
    interrupts = [KeyboardInterrupt]

    def follow() -> Any:
        if interrupts:
            raise interrupts.pop()
        return lambda: "stream"

    reader = make_reader(read, SHAPE, "float32", follow)
    with pytest.raises(KeyboardInterrupt):
        reader(gradient())
    assert reader(gradient()).stream == "read"
    assert reader(gradient()).stream == "stream"
