"""Choose the devices of a command, before JAX starts its backends."""

import jax

from rrfp_jax.planning.layout import Layout
from rrfp_jax.runtime.cluster.virtual_cpu import pin_threads, use_virtual_devices


def stage_devices(layout: Layout, *, platform: str | None, pinned: bool = False) -> tuple[jax.Device, ...]:
    """The devices of a run of one process: virtual ones on ``cpu``, else the first that JAX finds.

    ``pinned`` as for :func:`use_cpu`. Raises ValueError if they are too few.
    """
    wanted = layout.num_devices
    if platform == "cpu":
        use_cpu(wanted, pinned=pinned)
    elif pinned:
        pin_threads(wanted)
    found = jax.local_devices()
    if len(found) < wanted:
        raise ValueError(
            f"{len(found)} {found[0].platform} {'device' if len(found) == 1 else 'devices'} for {layout.num_stages} "
            f"stages x data {layout.data} x tensor {layout.tensor}: lower them to {len(found)} in all, or take "
            "platform cpu for virtual devices"
        )
    return tuple(found[:wanted])


def use_cpu(num_devices: int, *, pinned: bool = False) -> None:
    """Run on this many virtual CPU devices.

    ``pinned`` fixes the size of XLA's thread pools too, see :func:`rrfp_jax.runtime.cluster.virtual_cpu.pin_threads`.
    """
    if pinned:
        pin_threads(num_devices)
    use_virtual_devices(num_devices)
