"""Units, devices and ranks of a layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stages, data, tensor = (draw(st.integers(1, 4)) for _ in range(3))
    divisors = [n for n in range(1, stages * data * tensor + 1) if stages * data * tensor % n == 0]
    return Layout(num_stages=stages, data=data, tensor=tensor, num_ranks=draw(st.sampled_from(divisors)))


@given(layouts())
def test_every_device_belongs_to_one_unit_and_one_rank(layout: Layout) -> None:
    devices = [device for unit in range(layout.num_units) for device in layout.devices_of(unit)]
    assert sorted(devices) == list(range(layout.num_devices))
    owners = [layout.rank_of_device(device) for device in range(layout.num_devices)]
    assert owners == sorted(owners)
    assert {owners.count(rank) for rank in range(layout.num_ranks)} == {layout.devices_per_rank}


@given(layouts())
def test_ranks_and_units_say_the_same(layout: Layout) -> None:
    for unit in range(layout.num_units):
        assert layout.unit(layout.stage_of(unit), layout.replica_of(unit)) == unit
        ranks = layout.ranks_of(unit)
        assert ranks == tuple(sorted({layout.rank_of_device(d) for d in layout.devices_of(unit)}))
        assert all(unit in layout.units_of(rank) for rank in ranks)
        assert set(ranks) <= set(layout.ranks_of_stage(layout.stage_of(unit)))
    hosted = [unit for rank in range(layout.num_ranks) for unit in layout.units_of(rank)]
    assert set(hosted) == set(range(layout.num_units))


def test_the_tensor_axis_is_innermost_and_then_data() -> None:
    layout = Layout(num_stages=2, data=2, tensor=2, num_ranks=8)
    assert layout.devices_of(layout.unit(0, 0)) == (0, 1)
    assert layout.devices_of(layout.unit(0, 1)) == (2, 3)
    assert layout.devices_of(layout.unit(1, 0)) == (4, 5)
    assert layout.ranks_of(layout.unit(1, 1)) == (6, 7)
    assert layout.units_of(5) == (layout.unit(1, 0),)


def test_a_rank_may_host_several_stages() -> None:
    layout = Layout(num_stages=4, num_ranks=2)
    assert [layout.units_of(rank) for rank in (0, 1)] == [(0, 1), (2, 3)]


def test_what_cannot_be_dealt_out_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"3 stages x data 1 x tensor 2 need 6 devices.*4 processes.*divides 6"):
        Layout(num_stages=3, tensor=2, num_ranks=4)
    with pytest.raises(ValueError, match="data is 0: give at least 1"):
        Layout(num_stages=3, data=0)


@given(layouts(), st.integers(1, 16))
def test_stages_share_devices_evenly_and_what_belongs_to_one_stage_never_does(layout: Layout, num_devices: int) -> None:
    for rank in range(layout.num_ranks):
        try:
            shared = layout.shared_devices(rank, num_devices)
        except ValueError:
            assert num_devices < min(layout.data * layout.tensor, layout.devices_per_rank)
            continue
        assert len(shared) == layout.devices_per_rank
        assert set(shared) <= set(range(num_devices))
        first = rank * layout.devices_per_rank
        places = [((first + i) // (layout.data * layout.tensor), device) for i, device in enumerate(shared)]
        assert len(set(places)) == len(places), "a stage has a device twice"
        if num_devices >= len(shared):
            assert shared == tuple(range(len(shared)))


def test_how_stages_share_devices() -> None:
    assert Layout(num_stages=4).shared_devices(0, 1) == (0, 0, 0, 0)
    assert Layout(num_stages=5).shared_devices(0, 2) == (0, 0, 0, 1, 1)
    assert Layout(num_stages=4, num_ranks=2).shared_devices(1, 1) == (0, 0)
    assert Layout(num_stages=4, tensor=2).shared_devices(0, 5) == (0, 1, 0, 1, 2, 3, 2, 3)
    with pytest.raises(ValueError, match=r"data 2 x tensor 2 need 4 of their own"):
        Layout(num_stages=4, data=2, tensor=2).shared_devices(0, 3)
    with pytest.raises(ValueError, match=r"data 1 x tensor 2 x fsdp 2 need 4 of their own"):
        Layout(num_stages=4, mesh={"tensor": 2, "fsdp": 2}).shared_devices(0, 3)
