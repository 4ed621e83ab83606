"""Which devices a process may see, and whether all are there."""

import pytest

from rrfp_jax.runtime.start_jax import check_devices, visible_devices

HOSTS = ("a", "b", "a", "b", "c")


@pytest.mark.parametrize(
    ("rank", "environ", "expected"),
    [
        (0, {}, "0,1"),
        (2, {}, "2,3"),
        (3, {}, "2,3"),
        (4, {}, None),  # alone on its host
        (2, {"CUDA_VISIBLE_DEVICES": "6,7"}, None),  # a scheduler has dealt them out
        (2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        (2, {"ROCR_VISIBLE_DEVICES": "1,3"}, None),
    ],
)
def test_ranks_of_a_host_divide_its_devices(rank: int, environ: dict[str, str], expected: str | None):
    assert visible_devices(rank, HOSTS, 2, environ) == expected


def test_missing_devices_are_named_on_every_rank():
    check_devices(1, 1, [0, 0, 1, 1, 1], 2, 2)
    for rank in range(3):
        with pytest.raises(
            ValueError, match=r"2 devices on each of 3 ranks \(6 in all\), but rank 1 has 1, rank 2 has 0"
        ):
            check_devices(rank, rank, [0, 0, 1], 3, 2)


def test_other_numbers_than_jaxs_are_refused():
    with pytest.raises(ValueError, match="this is rank 1, but JAX calls it process 0"):
        check_devices(1, 0, [0, 1], 2, 1)
