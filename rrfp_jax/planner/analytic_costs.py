"""Costs of a run's model on a device that need not be there: from its record, by a roofline."""

from collections.abc import Mapping, Sequence
from itertools import product

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts
from rrfp_jax.costs.devices import Device, Efficiencies
from rrfp_jax.costs.roofline import Roofline
from rrfp_jax.layout import TENSOR, other_axes, spans
from rrfp_jax.planner.layer_kinds import FLOAT_BYTES
from rrfp_jax.planner.microbatches import MicrobatchRows, rows_of_microbatch
from rrfp_jax.planner.model_layers import ModelLayers, model_layers


def analytic_book(
    config: TrainConfig,
    device: Device,
    *,
    microbatch_sizes: Sequence[int],
    tensors: Sequence[int] = (1,),
    remats: Sequence[str] = ("none",),
    efficiencies: Efficiencies | None = None,
    num_devices: int | None = None,
    rows: MicrobatchRows | None = None,
) -> CostBook:
    """Returns the costs of a run's model for each of these ways to run it.

    Links are those of ``num_devices`` (None: as many as the configuration has): between hosts, where one host has not
    so many. ``rows`` are those of a microbatch (None: read from the data).

    Operations of a step, over those that the devices could do in its time, are its MFU: those of the model alone,
    forward and backward, without rematerialisation. For each token of a decoder they are 6 for every parameter of a
    product, the head's included, and ``12 * layers * length * width of all heads`` for attention, whose squares count
    whole. The embedding is a look-up and counts nothing.

    Raises ValueError, with the remedy, where devices cannot share the layers, or the data cannot be read.
    """
    from rrfp_jax.programs.target import Target  # a plan whose costs come from a file loads no JAX

    found, layout = efficiencies or Efficiencies(), config.pipeline
    entries, models, target = [], [], Target.like(device)
    for size in dict.fromkeys(microbatch_sizes):
        of_size = rows or rows_of_microbatch(config, size)
        for tensor, remat in product(dict.fromkeys(tensors), dict.fromkeys(remats)):
            models.append(
                model_layers(config, microbatch_size=size, tensor=tensor, remat=remat, target=target, rows=of_size)
            )
            costs = _costs(models[-1], config, device, found)
            entries.append(CostEntry(types=costs, microbatch_size=size, tensor=tensor, remat=remat))
    return CostBook(
        layers=models[0].layers,
        entries=tuple(entries),
        ends=models[0].ends,
        links=device.links(num_devices or layout.num_devices, found),
        mesh=other_axes(layout.mesh),
        task_ms=found.launch_ms,
        tokens_per_sample=models[0].tokens_per_sample,
        device=device.title,
        device_bytes=device.num_bytes,
        device_flops=_roofline(config, device, found, {}).peak_flops,
        source=f"analytic: {found.compute:.0%} of the peak's operations, {found.memory:.0%} of the memory's bandwidth",
    )


def _roofline(config: TrainConfig, device: Device, efficiencies: Efficiencies, mesh: Mapping[str, int]) -> Roofline:
    return Roofline(
        device=device,
        efficiencies=efficiencies,
        tensor=mesh.get(TENSOR, 1),
        spans=spans(mesh),
        is_float32=config.model.compute_dtype == "float32",
    )


def _costs(
    model: ModelLayers, config: TrainConfig, device: Device, efficiencies: Efficiencies
) -> dict[str, LayerCosts]:
    return {
        name: _roofline(config, device, efficiencies, each.mesh).costs(
            each.sizes,
            fixed_bytes=each.fixed_bytes,
            param_bytes=FLOAT_BYTES[config.model.param_dtype],
            num_moments=each.num_moments,
            trains=each.trains,
            has_backward=each.has_backward,
        )
        for name, each in model.types.items()
    }
