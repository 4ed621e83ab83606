"""Which process and device does what: ``num_stages x data x tensor`` devices, dealt out to ranks in order.

A *unit* is one replica of one stage: a stage of its own with an arbiter of its own, on ``tensor`` devices. Devices are
numbered with the tensor axis innermost, then data, then stages, and dealt out to the ranks (processes) in that order,
the same number to each. So a rank may host several units, and a unit may span several ranks, which then form its
*group*.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from rrfp_jax.field_rules import AT_LEAST_1, check_fields


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of parallelism and the number of processes. Raises ValueError where they do not fit together."""

    num_stages: int
    data: int = 1
    """Replicas of the whole pipeline, each with its own share of the microbatches."""
    tensor: int = 1
    """Devices that share each layer of a stage."""
    num_ranks: int = 1
    """Processes."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_stages", "data", "tensor", "num_ranks")
        if self.num_devices % self.num_ranks:
            raise ValueError(
                f"{self.num_stages} stages x data {self.data} x tensor {self.tensor} need {self.num_devices} devices, "
                f"which cannot be dealt out evenly to {self.num_ranks} processes: start a number of processes that "
                f"divides {self.num_devices}"
            )

    @property
    def num_units(self) -> int:
        return self.num_stages * self.data

    @property
    def num_devices(self) -> int:
        return self.num_units * self.tensor

    @property
    def devices_per_rank(self) -> int:
        return self.num_devices // self.num_ranks

    def unit(self, stage: int, replica: int) -> int:
        """The number of a unit; replica 0 comes first, so that without data parallelism units are stages."""
        return replica * self.num_stages + stage

    def stage_of(self, unit: int) -> int:
        return unit % self.num_stages

    def replica_of(self, unit: int) -> int:
        return unit // self.num_stages

    def devices_of(self, unit: int) -> tuple[int, ...]:
        """The global numbers of a unit's devices, along its tensor axis."""
        first = (self.stage_of(unit) * self.data + self.replica_of(unit)) * self.tensor
        return tuple(range(first, first + self.tensor))

    def rank_of_device(self, device: int) -> int:
        return device // self.devices_per_rank

    def ranks_of(self, unit: int) -> tuple[int, ...]:
        """The ranks that hold a unit's devices, ascending; the first one leads the group."""
        return self._ranks_of[unit]

    def units_of(self, rank: int) -> tuple[int, ...]:
        """The units of which a rank holds devices, ascending."""
        return tuple(unit for unit in range(self.num_units) if rank in self._ranks_of[unit])

    def units_of_stage(self, stage: int) -> tuple[int, ...]:
        """All replicas of a stage."""
        return tuple(self.unit(stage, replica) for replica in range(self.data))

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold devices of any replica of a stage, ascending."""
        return tuple(sorted({rank for unit in self.units_of_stage(stage) for rank in self._ranks_of[unit]}))

    def shared_devices(self, rank: int, num_devices: int) -> tuple[int, ...]:
        """For each device that the layout asks of a rank, which of the ``num_devices`` that it has stands for it.

        Where these are fewer, stages share them evenly, consecutive ones together; the replicas and tensor parts of one
        stage keep to devices of their own. Raises ValueError where they are too few even for that.
        """
        wanted = range(rank * self.devices_per_rank, (rank + 1) * self.devices_per_rank)
        if num_devices >= len(wanted):
            return tuple(range(len(wanted)))
        stages = [
            len(list(devices)) for _, devices in groupby(wanted, lambda device: device // self._devices_per_stage)
        ]
        num_sets = num_devices // max(stages)
        if not num_sets:
            raise ValueError(
                f"rank {rank} has {num_devices} devices, and stages may share them, but data {self.data} x tensor "
                f"{self.tensor} need {max(stages)} of their own: lower these degrees, or give more devices"
            )
        firsts = [number * num_sets // len(stages) * max(stages) for number in range(len(stages))]
        return tuple(first + i for first, size in zip(firsts, stages, strict=True) for i in range(size))

    @property
    def _devices_per_stage(self) -> int:
        return self.data * self.tensor

    @cached_property
    def _ranks_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(dict.fromkeys(self.rank_of_device(device) for device in self.devices_of(unit)))
            for unit in range(self.num_units)
        )

    def describe(self) -> str:
        """For messages: ``2 stages x data 2 x tensor 2 on 4 processes``."""
        processes = "process" if self.num_ranks == 1 else "processes"
        return f"{self.num_stages} stages x data {self.data} x tensor {self.tensor} on {self.num_ranks} {processes}"
