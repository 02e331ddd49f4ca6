"""Laws of the layout: where every element lies, for any parameters, ranks and bucket sizes."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import bucket_sizes, params, shapes

from cupynccl_reduce import BucketLayout, LayoutError, ParamSpec, Segment, plan_buckets
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.layout import ALIGN_BYTES, Matrix, send_bound

Plan = tuple[
    tuple[ParamSpec, ...], int, int, tuple[BucketLayout, ...]
]  # with world_size and bucket_bytes

world_sizes = st.integers(1, 64)


def kind(item: ParamSpec | BucketLayout) -> tuple[str, str, str, str]:
    return item.dtype, item.reduce_dtype, item.shard_dtype, item.uses


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    specs, world_size = draw(params(max_size=12)), draw(world_sizes)
    bucket_bytes = draw(bucket_sizes)
    buckets = plan_buckets(specs, world_size=world_size, bucket_bytes=bucket_bytes)
    return specs, world_size, bucket_bytes, buckets


@given(shapes, world_sizes)
def test_shards_tile_the_parameter(shape: tuple[int, ...], world_size: int) -> None:
    spec = ParamSpec("p", shape, "float32")
    (bucket,) = plan_buckets([spec], world_size=world_size, bucket_bytes=1)
    (segment,) = bucket.matrix.segments
    intervals = [segment.interval(rank) for rank in range(world_size)]
    assert [i for start, stop in intervals for i in range(start, stop)] == list(range(spec.numel))
    assert segment.width == -(-spec.numel // world_size)
    assert all(stop - start <= segment.width for start, stop in intervals)


@given(plans())
def test_a_shard_depends_on_its_parameter_and_the_world_size_alone(plan: Plan) -> None:
    specs, world_size, _, buckets = plan
    segments = {s.name: s for bucket in buckets for s in bucket.matrix.segments}
    for spec in specs:
        (alone,) = plan_buckets([spec], world_size=world_size, bucket_bytes=1)
        (segment,) = alone.matrix.segments
        for rank in range(world_size):
            assert segments[spec.name].interval(rank) == segment.interval(rank)


@given(plans())
def test_segments_never_overlap_and_start_on_aligned_columns(plan: Plan) -> None:
    _, world_size, _, buckets = plan
    for bucket in buckets:
        column = 0
        for segment in bucket.matrix.segments:
            assert segment.column == column
            assert segment.columns >= segment.width
            column += segment.columns
            for dtype in (bucket.reduce_dtype, bucket.shard_dtype):
                assert segment.column * DTYPES[dtype].itemsize % ALIGN_BYTES == 0
        assert bucket.matrix.columns == column
        assert bucket.matrix.rows == world_size
        assert bucket.matrix.numel == world_size * column


@given(plans())
def test_every_parameter_is_in_exactly_one_bucket_of_its_own_kind(plan: Plan) -> None:
    specs, _, _, buckets = plan
    kinds = {spec.name: kind(spec) for spec in specs}
    assert Counter(name for bucket in buckets for name in bucket.names) == Counter(list(kinds))
    assert all(kinds[name] == kind(bucket) for bucket in buckets for name in bucket.names)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


@given(plans())
def test_a_bucket_closes_when_the_next_parameter_would_exceed_it(plan: Plan) -> None:
    specs, _, bucket_bytes, buckets = plan
    nbytes = {spec.name: spec.nbytes for spec in specs}
    for bucket in buckets:
        assert bucket.gradient_bytes == sum(nbytes[name] for name in bucket.names)
        assert bucket.gradient_bytes <= bucket_bytes or len(bucket.names) == 1
        later = [b for b in buckets[bucket.index + 1 :] if kind(b) == kind(bucket)]
        if later:
            assert bucket.gradient_bytes + nbytes[later[0].names[0]] > bucket_bytes


@given(plans())
def test_buckets_follow_backward_and_those_used_many_times_come_last(plan: Plan) -> None:
    specs, _, _, buckets = plan
    place = {spec.name: index for index, spec in enumerate(specs)}
    for wanted in {kind(spec) for spec in specs}:
        of_kind = [place[n] for b in buckets if kind(b) == wanted for n in b.names]
        assert of_kind == sorted(of_kind, reverse=True)
    last = [(bucket.uses == "many", -place[bucket.names[-1]]) for bucket in buckets]
    assert last == sorted(last)


@given(plans())
def test_rows_of_the_shard_arena_never_overlap(plan: Plan) -> None:
    _, _, _, buckets = plan
    end = 0
    for bucket in buckets:
        assert bucket.shard_offset >= end
        assert bucket.shard_offset % 256 == 0
        end = bucket.shard_offset + bucket.shard_bytes


@given(plans())
def test_the_plan_depends_on_nothing_but_its_arguments(plan: Plan) -> None:
    specs, world_size, bucket_bytes, buckets = plan
    again = plan_buckets(list(specs), world_size=world_size, bucket_bytes=bucket_bytes)
    assert list(map(repr, again)) == list(map(repr, buckets))


@given(plans())
def test_a_row_holds_what_its_rank_receives(plan: Plan) -> None:
    _, world_size, _, buckets = plan
    for bucket, rank in product(buckets, range(world_size)):
        row = bucket.matrix.row(rank)
        assert (row.rows, row.columns) == (1, bucket.matrix.columns)
        for mine, whole in zip(row.segments, bucket.matrix.segments, strict=True):
            start, stop = whole.interval(rank)
            assert mine == Segment(
                whole.name, stop - start, whole.width, whole.column, whole.columns
            )
            assert mine.interval(0) == (0, stop - start)


@given(plans())
def test_split_buckets_use_the_same_shard_memory(plan: Plan) -> None:
    _, world_size, _, buckets = plan
    for bucket in buckets:
        itemsize = DTYPES[bucket.shard_dtype].itemsize
        offset = bucket.shard_offset
        for single, segment in zip(bucket.split(), bucket.matrix.segments, strict=True):
            assert single.names == (segment.name,)
            assert kind(single) == kind(bucket)
            (alone,) = single.matrix.segments
            assert (alone.column, alone.columns) == (0, single.matrix.columns)
            assert single.matrix.numel == world_size * segment.columns
            assert single.shard_offset == offset
            offset += segment.columns * itemsize
        assert offset == bucket.shard_offset + bucket.shard_bytes
        assert sum(single.send_bytes for single in bucket.split()) == bucket.send_bytes


@pytest.mark.parametrize("uses", ["once", "many"])
@pytest.mark.parametrize("bucket_bytes", [1, 5, 8, 24, 33, 1000])
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("numels", [(1, 2, 3, 4), (7, 1, 1, 12), (5, 5, 0, 9), (2,), (0,)])
def test_the_send_bound_holds_for_every_order_of_arrival(
    numels: tuple[int, ...], world_size: int, bucket_bytes: int, uses: str
) -> None:
    specs = [ParamSpec(f"p{i}", (n,), "float32", uses=uses) for i, n in enumerate(numels)]
    buckets = plan_buckets(specs, world_size=world_size, bucket_bytes=bucket_bytes)
    layouts = [single for bucket in buckets for single in bucket.split()]
    bound = send_bound(layouts, bucket_bytes)
    for sequence in permutations(layouts):
        capacity, filled, sent = bucket_bytes, 0, 0
        for layout in sequence:
            if filled and filled + layout.gradient_bytes > capacity:
                filled = sent = 0
            capacity = max(capacity, layout.gradient_bytes)
            filled += layout.gradient_bytes
            sent += layout.send_bytes
            assert sent <= bound
    # Those that repeat get some room on top; test_policies shows that they never overflow it.
    room = 0 if uses == "once" else bucket_bytes
    assert bound <= sum(layout.send_bytes for layout in layouts) + room


def test_nothing_in_a_plan_grows_with_the_world_size() -> None:
    specs = [ParamSpec(f"p{i}", (i % 700, 3), "bfloat16") for i in range(20_000)]
    counts = []
    for world_size in (1, 4096):
        plan = plan_buckets(specs, world_size=world_size, bucket_bytes=1 << 20)
        counts.append(count_objects(plan))
    assert counts[0] == counts[1]
    assert counts[1][Segment] == len(specs)
    assert counts[1][BucketLayout] == counts[1][Matrix] == len(plan)


def count_objects(root: object) -> Counter[type]:
    """Count all that is reachable from `root`, but for numbers and names."""
    counts: Counter[type] = Counter()
    seen: set[int] = set()
    found = [root]
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, int | str | type):
            continue
        seen.add(id(item))
        counts[type(item)] += 1
        found += gc.get_referents(item)
    return counts


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, None, "2"])
def test_a_wrong_world_size_is_refused(world_size: object) -> None:
    with pytest.raises(LayoutError, match=rf"world_size must be .*, not {world_size!r}"):
        plan_buckets([ParamSpec("p", (1,), "float32")], world_size=world_size, bucket_bytes=1)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 64.0, True, None, "64"])
def test_a_wrong_bucket_size_is_refused(bucket_bytes: object) -> None:
    with pytest.raises(LayoutError, match=rf"bucket_bytes must be .*, not {bucket_bytes!r}"):
        plan_buckets([ParamSpec("p", (1,), "float32")], world_size=1, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        pytest.param([], "no parameters: give at least one", id="none"),
        pytest.param(["p"], "must be ParamSpec values, not 'p'", id="a-name"),
        pytest.param(
            [ParamSpec("p", (1,), "float32"), ParamSpec("p", (2,), "float32")],
            "parameter 'p' is given twice",
            id="one-name-twice",
        ),
    ],
)
def test_a_wrong_parameter_list_is_refused(specs: list[ParamSpec], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_buckets(specs, world_size=1, bucket_bytes=1)
