"""When a bucket is launched, and what its launch holds. No arrays, no threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import bucket_sizes, params

from cupynccl_reduce import ParamSpec, ProtocolError, plan_buckets
from cupynccl_reduce.policies import Arrival, Planned

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.layout import Launch

SIX = [ParamSpec(f"p{i}", (2,), "float32") for i in range(6)]  # 8 bytes each


def planned(specs: Sequence[ParamSpec], bucket_bytes: int, **options: int) -> Planned:
    world_size, max_buffers = options.get("world_size", 2), options.get("max_buffers", 2)
    buckets = plan_buckets(specs, world_size=world_size, bucket_bytes=bucket_bytes)
    policy = Planned(
        buckets,
        straight=lambda layout: layout.reduce_dtype == layout.shard_dtype,
        world_size=world_size,
        max_buffers=max_buffers,
    )
    policy.begin(accumulate=False)
    return policy


def arrival(specs: Sequence[ParamSpec], bucket_bytes: int, **options: int) -> Arrival:
    world_size, max_buffers = options.get("world_size", 2), options.get("max_buffers", 2)
    policy = Arrival(
        plan_buckets(specs, world_size=world_size, bucket_bytes=bucket_bytes),
        straight=lambda layout: layout.reduce_dtype == layout.shard_dtype,
        world_size=world_size,
        max_buffers=max_buffers,
        bucket_bytes=bucket_bytes,
    )
    policy.begin(accumulate=False)
    return policy


def packed(launches: Sequence[Launch]) -> list[tuple[str, ...]]:
    return [part.layout.names for launch in launches for part in launch.pack]


@given(params(max_size=10), bucket_sizes, st.integers(1, 8), st.integers(1, 3), st.randoms())
def test_planned_buckets_launch_once_and_in_index_order_as_early_as_they_can(
    specs: tuple[ParamSpec, ...],
    bucket_bytes: int,
    world_size: int,
    max_buffers: int,
    order: random.Random,
) -> None:
    policy = planned(specs, bucket_bytes, world_size=world_size, max_buffers=max_buffers)
    for accumulate in (False, True, False):
        policy.begin(accumulate=accumulate)
        names = [spec.name for spec in specs]
        order.shuffle(names)
        launched, arrived = [], set()
        for name in names:
            (policy.skip if order.random() < 0.2 else policy.arrive)(name)
            arrived.add(name)
            launched += policy.due()
            early = [b for b in policy.layouts if b.uses == "once"]
            complete = [arrived.issuperset(bucket.names) for bucket in early]
            assert len(launched) == (complete.index(False) if False in complete else len(early))
            assert set(policy.waiting()) == {b.index for b in policy.layouts[len(launched) :]}
        assert not policy.missing()
        launched += policy.finish()
        assert not list(policy.finish())
        with_data = [bucket for bucket in policy.layouts if bucket.matrix.numel]
        assert packed(launched) == [bucket.names for bucket in with_data]
        for index, (launch, bucket) in enumerate(zip(launched, policy.layouts, strict=True)):
            assert launch.last
            assert launch.buffer == index % len(policy.buffer_bytes)
            assert len(policy.buffer_bytes) <= max_buffers
            assert bucket.send_bytes <= policy.buffer_bytes[launch.buffer]
            assert launch.calls == (launch.pack if world_size > 1 else ())
            for part in launch.pack:
                assert part.accumulate is accumulate
                assert part.straight is not (part in launch.unpack)
                assert not (part.straight and accumulate)


@given(params(max_size=10), bucket_sizes, st.integers(1, 8), st.integers(1, 3), st.randoms())
def test_arrival_buckets_hold_what_arrived_in_order_and_never_overflow(
    specs: tuple[ParamSpec, ...],
    bucket_bytes: int,
    world_size: int,
    max_buffers: int,
    order: random.Random,
) -> None:
    policy = arrival(specs, bucket_bytes, world_size=world_size, max_buffers=max_buffers)
    of = {spec.name: spec for spec in specs}
    capacity = dict.fromkeys({spec.reduce_dtype for spec in specs}, bucket_bytes)
    seen: set[str] = set()
    for accumulate in (False, True, False):
        policy.begin(accumulate=accumulate)
        if not accumulate:
            seen = set()
        names = [s.name for s in specs for _ in range(1 if s.uses == "once" else 3)]
        order.shuffle(names)
        launches: list[Launch] = []
        for name in names:
            policy.arrive(name)
            launches += policy.due()
        launches += policy.finish()
        assert not list(policy.finish())
        assert packed(launches) == [(name,) for name in names if of[name].numel]
        filling: dict[int, list[str]] = {}
        for launch in launches:
            for part in launch.pack:
                (name,) = part.layout.names
                assert part.offset + part.layout.send_bytes <= policy.buffer_bytes[launch.buffer]
                assert part.accumulate is (name in seen)
                seen.add(name)
                filling.setdefault(launch.buffer, []).append(name)
                wire = of[name].reduce_dtype
                capacity[wire] = max(capacity[wire], of[name].nbytes)
                held = sum(of[n].nbytes for n in filling[launch.buffer])
                assert held <= capacity[wire]
            if launch.last:
                held_names = filling.pop(launch.buffer)
                sent = [part.layout.names[0] for part in launch.calls]
                assert sent == (held_names if world_size > 1 else [])
        assert not filling


def test_arrival_launches_when_the_next_gradient_does_not_fit() -> None:
    policy = arrival(SIX, 16)
    sent = []
    for name in ("p3", "p0", "p5", "p1", "p2", "p4"):
        policy.arrive(name)
        sent += [
            [p.layout.names[0] for p in launch.calls] for launch in policy.due() if launch.last
        ]
    assert sent == [["p3", "p0"], ["p5", "p1"]]
    assert [[p.layout.names[0] for p in launch.calls] for launch in policy.finish()] == [
        ["p2", "p4"]
    ]


def test_arrival_buffers_take_turns() -> None:
    policy = arrival(SIX, 8, max_buffers=3)
    for spec in SIX:
        policy.arrive(spec.name)
    assert [launch.buffer for launch in policy.due() if launch.last] == [0, 1, 2, 0, 1]


def test_a_gradient_larger_than_the_bucket_grows_it_for_good() -> None:
    specs = [ParamSpec("large", (6,), "float32"), *SIX]  # 24 bytes and six of 8
    policy = arrival(specs, 8)
    sent = []
    for name in ("p0", "large", "p1", "p2", "p3", "p4"):
        policy.arrive(name)
        sent += [
            [p.layout.names[0] for p in launch.calls] for launch in policy.due() if launch.last
        ]
    assert sent == [["p0"], ["large"], ["p1", "p2", "p3"]]


def test_what_never_arrives_is_zeroed_by_each_rank_alone() -> None:
    policy = arrival([*SIX, ParamSpec("empty", (0,), "float32")], 1000)
    for name in ("p1", "p4"):
        policy.arrive(name)
    list(policy.finish())
    launches = list(policy.untouched())
    assert packed(launches) == [("p5",), ("p3",), ("p2",), ("p0",)]
    assert all(launch.last and launch.unpack and not launch.calls for launch in launches)
    assert not list(planned(SIX, 8).untouched())


@pytest.mark.parametrize("build", [planned, arrival])
def test_a_second_arrival_is_refused_and_changes_nothing(
    build: Callable[..., Planned | Arrival],
) -> None:
    policy = build(SIX, 1000)
    policy.arrive("p1")
    list(policy.due())
    missing = policy.missing()
    with pytest.raises(ProtocolError, match=r"twice.*uses='many'"):
        policy.arrive("p1")
    assert policy.missing() == missing == ("p5", "p4", "p3", "p2", "p0")
    assert not list(policy.due())


@pytest.mark.parametrize("build", [planned, arrival])
def test_a_gradient_after_its_skip_is_refused(build: Callable[..., Planned | Arrival]) -> None:
    policy = build(SIX, 1000)
    policy.skip("p1")
    for call in (policy.arrive, policy.skip):
        with pytest.raises(ProtocolError, match=r"skip_grad\(\) said that none would come"):
            call("p1")
    assert "p1" not in policy.missing()


def test_planned_refuses_a_gradient_whose_bucket_was_flushed() -> None:
    policy = planned(SIX, 1000)
    list(policy.finish())
    with pytest.raises(ProtocolError, match=r"launched already; .* before flush\(\)"):
        policy.arrive("p1")


def test_arrival_takes_gradients_after_a_flush() -> None:
    policy = arrival(SIX, 1000)
    policy.arrive("p1")
    assert [len(launch.calls) for launch in policy.finish()] == [0, 1]
    policy.arrive("p2")
    assert packed(list(policy.due())) == [("p2",)]


@pytest.mark.parametrize("build", [planned, arrival])
def test_a_parameter_used_many_times_may_come_again_until_the_end(
    build: Callable[..., Planned | Arrival],
) -> None:
    policy = build([ParamSpec("m", (2,), "float32", uses="many")], 1000)
    for _ in range(3):
        policy.arrive("m")
        assert all(not launch.last for launch in policy.due())
    assert [launch.last for launch in policy.finish()] == [True]


def test_nothing_is_sent_at_one_rank() -> None:
    for policy in (planned(SIX, 16, world_size=1), arrival(SIX, 16, world_size=1)):
        for spec in SIX:
            policy.arrive(spec.name)
        assert not any(launch.calls for launch in [*policy.due(), *policy.finish()])


def test_a_direct_gradient_is_one_more_call_and_all_rows_are_unpacked_together() -> None:
    specs = [ParamSpec("a", (8,), "float32"), ParamSpec("b", (3,), "float32")]
    (layout,) = plan_buckets(specs, world_size=2, bucket_bytes=64, direct_bytes=32)
    assert layout.names == ("b", "a")  # what may be sent from its place comes last
    policy = Planned([layout], straight=lambda _: False, world_size=2, max_buffers=2)
    (launch,) = (policy.begin(accumulate=False), *policy.finish())[1:]
    packed, direct = launch.pack
    assert launch.calls == launch.pack
    assert [part.layout.names for part in launch.pack] == [("b",), ("a",)]
    assert [part.direct for part in launch.pack] == [False, True]
    # Two matrices of 2 x 4 elements each, then their rows of 16 bytes, side by side.
    assert (packed.offset, packed.row) == (0, 64)
    assert (direct.offset, direct.row) == (32, 80)
    (whole,) = launch.unpack
    assert (whole.layout, whole.row) == (layout, 64)
    assert policy.buffer_bytes == (96,)
