"""The costs of a layer by a roofline: as long as its operations or its bytes take, whichever is longer.

::

    t = max(operations / (peak * compute), bytes / (bandwidth * memory)) + sums

for F, the input gradient and the weight gradient each (Williams et al. 2009). Where ``n`` devices share a layer each of
them computes a part, and sums of activations follow, as a ring does them: ``2 (n - 1) / n`` of the bytes over the link
between them. Axes that cut rows, positions and parameters add the bytes that travel over each: parameters that programs
gather, keys and values, tokens on their way to experts, and sums of gradients; nothing of it is held to overlap with
computing. The time of launching belongs to the task and is no part of a layer.

The optimizer reads and writes parameters, accumulators and moments once. A head's bytes and operations are those
of its logits, which may be as much as several layers; an embedding only moves bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rrfp_jax.costs.devices import Device, Efficiencies
from rrfp_jax.costs.layer_costs import LayerCosts
from rrfp_jax.costs.layer_sizes import LayerSizes
from rrfp_jax.field_rules import AT_LEAST_1, check_fields


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A device on whose roofline the times of layers are read."""

    device: Device
    efficiencies: Efficiencies
    tensor: int = 1
    """Devices that share every layer."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """By axis of a stage's mesh, over how many neighbouring devices a group along it stretches."""
    is_float32: bool = False
    """Whether products are computed in float32 instead of bfloat16."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "tensor")

    @property
    def peak_flops(self) -> float:
        """Operations per second of one device."""
        return self.device.float32_flops if self.is_float32 else self.device.flops

    def task_ms(self, flops: float, moved_bytes: float) -> float:
        """Returns the milliseconds of a task with ``flops`` on all devices of the stage, and ``moved_bytes`` on
        each."""
        compute_s = flops / self.tensor / (self.peak_flops * self.efficiencies.compute)
        return max(compute_s * 1e3, moved_bytes / (self.device.memory_gb_per_s * self.efficiencies.memory) / 1e6)

    def sums_ms(self, number: int, num_bytes: int) -> float:
        """Returns the milliseconds of ``number`` sums over the devices of the stage."""
        if self.tensor == 1:
            return 0.0
        rate = self.device.rate_gb_per_s(self.tensor) * self.efficiencies.links
        return number * (2 * (self.tensor - 1) / self.tensor * num_bytes / rate / 1e6 + self.efficiencies.sum_ms)

    def sent_ms(self, sizes: LayerSizes) -> tuple[float, float, float]:
        """Returns the milliseconds that axes which share no matrices add to F, the input gradient and the weight
        gradient."""
        found = [0.0, 0.0, 0.0]
        for sent in sizes.sent:
            rate = self.device.rate_gb_per_s(self.spans.get(sent.axis, 1)) * self.efficiencies.links
            for task, num_bytes in enumerate(sent[1:]):
                found[task] += num_bytes / rate / 1e6 + self.efficiencies.sum_ms if num_bytes else 0.0
        return found[0], found[1], found[2]

    def costs(
        self,
        sizes: LayerSizes,
        *,
        fixed_bytes: int,
        param_bytes: int,
        num_moments: int = 2,
        trains: bool = True,
        has_backward: bool = True,
    ) -> LayerCosts:
        """Returns the costs of a layer; ``param_bytes`` of each of its parameters, for which the optimizer has so many
        moments. Frozen ones are neither trained nor owed."""
        flops = sizes.tasks(trains=trains, has_backward=has_backward)
        moved = [each * does for each, does in zip(sizes.moved_bytes, (True, has_backward, trains), strict=True)]
        shared = [each / sizes.sharing for each in flops]
        forward, input_gradient, weight_gradient = map(self.task_ms, shared, moved)
        sums, sent = [self.sums_ms(number, sizes.sum_bytes) for number in sizes.sums], self.sent_ms(sizes)
        updated = sizes.num_held * trains * 2 * ((1 + num_moments) * param_bytes + 4)
        return LayerCosts(
            forward_ms=forward + sums[0] + sent[0],
            input_gradient_ms=input_gradient + (sums[1] + sent[1]) * has_backward,
            weight_gradient_ms=weight_gradient + sent[2] * trains,
            update_ms=self.task_ms(0.0, updated),
            fixed_bytes=fixed_bytes,
            gradient_bytes=sizes.num_held * 4 * trains,
            stash_bytes=sizes.stash_bytes * has_backward,
            remade_bytes=sizes.remade_bytes * has_backward,
            owed_bytes=sizes.owed_bytes * trains,
            temporaries_bytes=sizes.temporaries_bytes,
            more_temporaries_bytes=sizes.more_temporaries_bytes * trains,
            output_bytes=sizes.output_bytes,
            flops=sum(sizes.flops.tasks(trains=trains, has_backward=has_backward)),
        )
