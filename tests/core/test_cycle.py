"""Which calls a cycle allows, and whether a backward accumulates."""

from __future__ import annotations

import pytest

from cupynccl_reduce.cycle import Cycle
from cupynccl_reduce.errors import ProtocolError


@pytest.fixture
def cycle() -> Cycle:
    return Cycle("rank 1 of 2")


def test_backwards_accumulate_until_the_cycle_lands(cycle: Cycle) -> None:
    for step in (1, 2):
        for accumulate in (False, True, True):
            assert cycle.begin() is accumulate
            cycle.end()
        assert cycle.land() is True
        assert cycle.land() is False  # again: the same shards
        assert cycle.step == step
    assert cycle.backwards == 6


def test_a_discarded_cycle_leaves_nothing_to_accumulate_onto(cycle: Cycle) -> None:
    cycle.begin()
    cycle.end()
    cycle.discard()
    with pytest.raises(ProtocolError, match="the last cycle was discarded"):
        cycle.land()
    assert cycle.begin() is False
    assert cycle.step == 2


def test_only_discard_leads_on_from_a_failed_backward(cycle: Cycle) -> None:
    cycle.begin()
    cycle.fail()
    cycle.end()
    for call in (cycle.begin, cycle.land):
        with pytest.raises(ProtocolError, match=r"every rank calls discard\(\) first"):
            call()
    cycle.discard()
    assert cycle.begin() is False


def test_there_is_nothing_to_wait_for_before_the_first_backward(cycle: Cycle) -> None:
    with pytest.raises(ProtocolError, match=r"no backward has run \[rank 1 of 2, step 0\]"):
        cycle.land()


def test_what_is_clipped_may_be_measured_and_closed_and_nothing_else(cycle: Cycle) -> None:
    for close in (cycle.land, cycle.discard):
        cycle.begin()
        cycle.end()
        cycle.check_norm("clip()", clips=True)
        cycle.clip()
        assert cycle.name == "CLIPPED"
        cycle.check_norm("norm()", clips=False)
        with pytest.raises(ProtocolError, match=r"clip\(\): the shards hold .* scaled already"):
            cycle.check_norm("clip()", clips=True)
        with pytest.raises(ProtocolError, match=r"scaled already; wait\(\) or discard\(\) first"):
            cycle.begin()
        close()
        with pytest.raises(ProtocolError, match=r"call it between"):
            cycle.check_norm("norm()", clips=False)


def test_a_failed_cycle_is_measured_with_the_others_and_stays_failed(cycle: Cycle) -> None:
    cycle.begin()
    assert not cycle.failed
    cycle.fail()
    cycle.end()
    cycle.check_norm("clip()", clips=True)
    cycle.clip()
    assert cycle.failed
    with pytest.raises(ProtocolError, match=r"every rank calls discard\(\) first"):
        cycle.land()


@pytest.mark.parametrize("call", ["begin", "land", "discard"])
def test_an_open_backward_must_be_left_first(cycle: Cycle, call: str) -> None:
    cycle.begin()
    with pytest.raises(
        ProtocolError, match=r"inside backward\(\): leave .*\[rank 1 of 2, step 1\]"
    ):
        getattr(cycle, call)()
    assert cycle.open
    cycle.end()
    assert cycle.land() is True


@pytest.mark.parametrize("call", ["begin", "land", "discard", "check"])
def test_a_closed_reducer_does_nothing_more(cycle: Cycle, call: str) -> None:
    cycle.closed = True
    with pytest.raises(ProtocolError, match="closed; build another one"):
        getattr(cycle, call)()


def test_the_name_is_the_state(cycle: Cycle) -> None:
    names = [cycle.name]
    cycle.begin()
    names.append(cycle.name)
    cycle.end()
    names.append(cycle.name)
    cycle.land()
    names.append(cycle.name)
    cycle.discard()
    names.append(cycle.name)
    cycle.closed = True
    names.append(cycle.name)
    assert names == ["NEW", "OPEN", "REDUCING", "LANDED", "DISCARDED", "CLOSED"]
