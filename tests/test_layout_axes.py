"""The axes of a stage's mesh."""

import pytest

from rrfp_jax.layout import Layout


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
