"""Units, devices and ranks of a layout, the axes of its meshes, and the tree of control messages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.layout import CONTROL_DEGREE, Layout, children, parent


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stages, data, tensor = (draw(st.integers(1, 4)) for _ in range(3))
    divisors = [n for n in range(1, stages * data * tensor + 1) if stages * data * tensor % n == 0]
    places = draw(st.permutations(range(stages * data)))
    order = tuple(place * tensor + i for place in places for i in range(tensor)) if draw(st.booleans()) else ()
    return Layout(num_stages=stages, data=data, tensor=tensor, num_ranks=draw(st.sampled_from(divisors)), order=order)


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


@given(layouts(), st.booleans())
def test_programs_of_several_processes_are_those_of_a_unit_or_of_the_sums_of_a_stage(layout: Layout, by: bool) -> None:
    together = [layout.devices_of(unit) for unit in range(layout.num_units)]
    if not by:
        together += [
            tuple(device for unit in layout.units_of_stage(stage) for device in layout.devices_of(unit))
            for stage in range(layout.num_stages)
        ]
    several = any(len({layout.rank_of_device(device) for device in devices}) > 1 for devices in together)
    assert layout.needs_collectives(sums_by_messages=by) == several


def test_the_tensor_axis_is_innermost_and_then_data() -> None:
    layout = Layout(num_stages=2, data=2, tensor=2, num_ranks=8)
    assert layout.devices_of(layout.unit(0, 0)) == (0, 1)
    assert layout.devices_of(layout.unit(0, 1)) == (2, 3)
    assert layout.devices_of(layout.unit(1, 0)) == (4, 5)
    assert layout.ranks_of(layout.unit(1, 1)) == (6, 7)
    assert layout.units_of(5) == (layout.unit(1, 0),)


def test_units_take_devices_in_the_order_that_is_named() -> None:
    layout = Layout(num_stages=3, tensor=2, num_ranks=3, order=(4, 5, 0, 1, 2, 3))
    assert [layout.devices_of(stage) for stage in range(3)] == [(4, 5), (0, 1), (2, 3)]
    assert [layout.units_of(rank) for rank in range(3)] == [(1,), (2,), (0,)]


@pytest.mark.parametrize("by_replica", [False, True])
def test_units_that_are_absent_have_no_devices(by_replica: bool) -> None:
    layout = Layout(num_stages=3, data=2, replicas=(1, 2, 1), tensor=2, num_ranks=4, by_replica=by_replica)
    assert (layout.num_units, layout.absent, layout.num_devices) == (6, (3, 5), 8)
    devices = [layout.devices_of(unit) for unit in range(6)]
    assert devices == (
        [(0, 1), (2, 3), (4, 5), (), (6, 7), ()] if by_replica else [(0, 1), (2, 3), (6, 7), (), (4, 5), ()]
    )
    assert layout.ranks_of(3) == ()
    assert sorted(unit for rank in range(4) for unit in layout.units_of(rank)) == [0, 1, 2, 4]
    assert layout.describe() == "3 stages x data 1,2,1 x tensor 2 on 4 processes"


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((1, 2), r"replicas are \(1, 2\): give 1 or more for each of 3 stages"),
        ((1, 0, 2), r"replicas are \(1, 0, 2\): give 1 or more for each of 3 stages"),
        ((1, 3, 1), "data is 2, and stages have up to 3 replicas: give data 3"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(replicas: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(num_stages=3, data=2, replicas=replicas)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 1, 2), "0,1,2' are no order of 4 devices: name each of 0 to 3 once, in the order in which stages"),
        ((0, 1, 1, 2), "0,1,1,2' are no order of 4 devices"),
        ((0, 1, 2, 7), "0,1,2,7' are no order of 4 devices"),
        ((0, 2, 1, 3), "devices 0, 2 would share a stage, which needs 2 that follow each other"),
    ],
)
def test_an_order_of_devices_that_cannot_be_is_refused(order: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(num_stages=2, tensor=2, order=order)


def test_stages_that_share_devices_have_no_order_of_devices() -> None:
    with pytest.raises(
        ValueError, match="rank 0 has 2 devices for 4 of the run: name an order of devices, or replicas"
    ):
        Layout(num_stages=4, order=(2, 0, 3, 1)).shared_devices(0, 2)


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
    layout = replace(layout, order=())  # with which none are shared
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


def test_the_first_axis_is_innermost_and_all_make_a_unit() -> None:
    layout = Layout(num_stages=2, data=2, mesh={"tensor": 2, "fsdp": 3}, num_ranks=4)
    assert (layout.unit_size, layout.num_devices) == (6, 24)
    assert layout.axes_of_stage == ((("tensor", 2), ("fsdp", 3)),) * 2
    assert layout.devices_of(2) == (6, 7, 8, 9, 10, 11)
    assert layout.describe() == "2 stages x data 2 x tensor 2 x fsdp 3 on 4 processes"
    assert Layout(num_stages=1, tensor=4).axes_of_stage == ((("tensor", 4),),)


@pytest.mark.parametrize(
    ("mesh", "tensor", "message"),
    [
        ({"data": 2}, 1, "mesh has an axis 'data': take another name"),
        ({"two words": 2}, 1, "mesh has an axis 'two words'"),
        ({"fsdp": 0}, 1, "mesh has 0 devices along fsdp: give at least 1"),
        ({"fsdp": 2}, 2, "tensor is 2 beside a mesh: give it in mesh alone"),
    ],
)
def test_meshes_that_are_none_are_refused(mesh: dict[str, int], tensor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(num_stages=2, mesh=mesh, tensor=tensor)


def test_stages_may_have_meshes_of_their_own_of_one_size() -> None:
    layout = Layout(num_stages=2, mesh=[{"fsdp": 4}, {"tensor": 4}])
    assert layout.describe() == "2 stages x data 1 x fsdp 4 or tensor 4 on 1 process"
    with pytest.raises(ValueError, match="stage 0 has fsdp 4, 4 devices, and stage 1 tensor 2, 2: give all stages"):
        Layout(num_stages=2, mesh=[{"fsdp": 4}, {"tensor": 2}])
    with pytest.raises(ValueError, match="1 meshes are given for 2 stages: give one for each"):
        Layout(num_stages=2, mesh=[{"fsdp": 4}])


def test_devices_that_do_not_fit_name_all_axes() -> None:
    with pytest.raises(ValueError, match="2 stages x data 1 x tensor 2 x fsdp 3 need 12 devices"):
        Layout(num_stages=2, mesh={"tensor": 2, "fsdp": 3}, num_ranks=5)


@pytest.mark.parametrize("degree", [1, 2, 3, CONTROL_DEGREE, 8])
@pytest.mark.parametrize("num_places", [1, 2, 5, 6, 21, 22, 100])
def test_every_place_but_the_root_has_one_parent_that_knows_it(num_places: int, degree: int) -> None:
    below = [child for place in range(num_places) for child in children(place, num_places, degree)]
    assert below == list(range(1, num_places))
    assert parent(0, degree) is None
    for place in range(num_places):
        assert len(children(place, num_places, degree)) <= degree
        for child in children(place, num_places, degree):
            assert parent(child, degree) == place


def test_the_way_to_the_root_is_short() -> None:
    depth, place = 0, 4095
    while (above := parent(place)) is not None:
        depth, place = depth + 1, above
    assert depth == 6
