"""The NCCL communicator over a stand-in for CuPy that counts, orders and raises. Needs no GPU."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cupynccl_reduce import CommunicationError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "cupynccl_reduce.communicators.nccl"


class FakeNccl(ModuleType):
    """Counts calls by name; `depth` is NCCL's group depth; what is in `failing` raises."""

    NcclError = type("NcclError", (RuntimeError,), {})
    NCCL_FLOAT32, NCCL_SUM = 7, 0
    available = True

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nccl")
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.version = 22809
        self.depth = 0

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def get_version(self) -> int:
        return self.version

    get_build_version = get_version

    def get_unique_id(self) -> bytes:
        self.call("get_unique_id")
        return b"token"

    def groupStart(self) -> None:  # noqa: N802  # CuPy's name
        self.depth += 1
        self.call("groupStart")

    def groupEnd(self) -> None:  # noqa: N802  # CuPy's name
        self.depth = 0
        self.call("groupEnd")

    def NcclCommunicator(self, *args: Any) -> Any:  # noqa: N802  # CuPy's name
        self.call("init")
        names = ("reduceScatter", "allGather", "allReduce", "broadcast", "destroy", "abort")
        methods = {n: (lambda *a, n=n: self.call(n)) for n in names}
        return SimpleNamespace(**methods)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    nccl = FakeNccl()
    cuda, cupy = ModuleType("cupy.cuda"), ModuleType("cupy")
    cuda.nccl = nccl
    cuda.Device = lambda index: nullcontext()
    cuda.runtime = SimpleNamespace(deviceGetPCIBusId=lambda device: "0000:01:00.0")
    cupy.cuda, cupy.__version__ = cuda, "14.0.0"
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield nccl
    sys.modules.pop(NAME, None)  # it holds on to the stand-in


def connect(world_size: int = 2) -> Any:
    return importlib.import_module(NAME).NcclCommunicator(world_size, b"token", 0, 0)


def array(numel: int, pointer: int) -> Any:
    return SimpleNamespace(size=numel, nbytes=4 * numel, data=SimpleNamespace(ptr=pointer))


STREAM = SimpleNamespace(ptr=3)


def test_e5_an_old_nccl_is_refused_with_both_versions(fake: FakeNccl) -> None:
    fake.version = 20902
    with pytest.raises(LayoutError, match=r"2\.9\.2.*2\.10\.0"):
        connect()
    assert fake.calls == []


def test_e5_a_constant_that_cupy_lacks_is_an_error_at_its_use_not_at_import(
    fake: FakeNccl,
) -> None:
    communicator = connect()
    with pytest.raises(LayoutError, match="NCCL_BFLOAT16"):
        communicator.all_gather(array(1, 8), array(2, 16), "bfloat16", STREAM)


def test_the_blocking_variable_is_refused(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(LayoutError, match="NCCL_COMM_BLOCKING=0"):
        connect()


def test_e1_one_rank_never_calls_nccl(fake: FakeNccl) -> None:
    communicator = connect(1)
    with communicator.group():
        communicator.reduce_scatter(array(2, 8), array(2, 8), "float32", "sum", STREAM)
    communicator.close()
    assert fake.calls == []


@pytest.mark.parametrize("ends", [("close",), ("abort",), ("close", "close"), ("abort", "close")])
def test_j5_a_communicator_is_torn_down_once(fake: FakeNccl, ends: tuple[str, ...]) -> None:
    communicator = connect()
    for end in ends:
        getattr(communicator, end)()
    assert fake.calls == ["init", {"close": "destroy", "abort": "abort"}[ends[0]]]
    with pytest.raises(CommunicationError, match=r"closed|aborted"):
        communicator.all_reduce(array(1, 8), array(1, 8), "float32", "sum", STREAM)


def test_j7_a_group_is_left_whatever_is_raised_in_it(fake: FakeNccl) -> None:
    communicator = connect()
    with pytest.raises(KeyError, match="planted"), communicator.group():  # noqa: PT012
        communicator.all_reduce(array(1, 8), array(1, 8), "float32", "sum", STREAM)
        raise KeyError("planted")
    assert fake.depth == 0
    communicator.close()
    assert fake.calls[-1] == "abort"  # destroy would wait for calls that never came


@pytest.mark.parametrize("error", [FakeNccl.NcclError("NCCL_ERROR_SYSTEM_ERROR"), KeyError(7)])
def test_k7_a_failing_call_says_where_and_with_what(fake: FakeNccl, error: Exception) -> None:
    communicator = connect()
    fake.failing["reduceScatter"] = error
    with pytest.raises(CommunicationError) as caught:
        communicator.reduce_scatter(array(2, 8), array(1, 16), "float32", "sum", STREAM)
    assert caught.value.__cause__ is error
    words = ("rank 0 of 2", "cuda:0", "0000:01:00.0", "NCCL 2.28.9", str(error.args[0]))
    assert all(word in str(caught.value) for word in words), caught.value


def test_counts_that_do_not_fit_never_reach_nccl(fake: FakeNccl) -> None:
    communicator = connect()
    with pytest.raises(LayoutError, match="5 and 4"):
        communicator.reduce_scatter(array(5, 8), array(2, 16), "float32", "sum", STREAM)
    assert fake.calls == ["init"]
