"""A run as its configuration lays it out, forecast without its devices: memory of every stage, and the step's time."""

import argparse
from dataclasses import replace

from rrfp_jax import core
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import order_of, ordering_of
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.devices import Device
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.costs.order_memory import forecast_memory
from rrfp_jax.layout import describe_axes
from rrfp_jax.models.cuts import balanced_counts, plan_cut
from rrfp_jax.models.vision_config import DECODER, ENCODER, OWN_CHUNK
from rrfp_jax.planner.analytic_costs import analytic_book
from rrfp_jax.planner.candidates import PlanCandidate
from rrfp_jax.planner.judging import Judge, draws_for
from rrfp_jax.planner.microbatches import MicrobatchRows
from rrfp_jax.planner.records import Plan, PlanChoice, PlanShape, Ranked
from rrfp_jax.planner.search import forecast

_CHOICES = (
    *("microbatches", "microbatch_size", "stages", "replicas", "tensor", "chunks_per_stage", "schedules", "consume"),
    *("remat", "devices", "batch_size"),
)


def check_as_configured(arguments: argparse.Namespace, config: TrainConfig | None) -> None:
    """Raises ValueError where options or the configuration ask for a part that such a forecast does not know."""
    if config is None:
        raise ValueError("--as-configured forecasts a configuration: give --config FILE.yaml")
    given = [name for name in _CHOICES if getattr(arguments, name) is not None]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise ValueError(
            f"{flag} is for a search, and --as-configured takes what the configuration says: leave one out"
        )
    layout = config.pipeline
    for name in ("offload", "recompute"):
        if getattr(layout, name) is not None:
            raise ValueError(f"--as-configured knows nothing of {name}: leave that out of the configuration")
    if layout.is_auto or isinstance(layout.window, str):
        raise ValueError(
            "--as-configured needs the cut, and the window in numbers: give layout and window so, or search"
        )


def configured_plan(config: TrainConfig, book: CostBook) -> Plan:
    """Returns the one choice that the configuration is, by these costs. Raises ValueError where it does not fit
    together."""
    one = _candidate(config, book)
    judge = Judge(book.noise, draws_for([one.choice.shape]), seed=0)
    ranked = Ranked(choice=one.choice, forecast=forecast(one, book, judge))
    return Plan(
        ranking=(ranked,), is_decided=True, num_draws=judge.num_draws, evaluations=1, notes=encoder_notes(config)
    )


def configured_memory(config: TrainConfig, device: Device, rows: MicrobatchRows) -> tuple[StageForecast, ...]:
    """Returns the memory of every stage on a device, worked out from the layers' sizes for microbatches of these
    rows."""
    layout = config.pipeline
    book = analytic_book(
        config,
        device,
        microbatch_sizes=[config.data.microbatch_size],
        tensors=[layout.tensor],
        remats=[layout.remat],
        rows=rows,
    )
    return _candidate(config, book).memory


def _candidate(config: TrainConfig, book: CostBook) -> PlanCandidate:
    layout = config.pipeline
    share = microbatches_per_replica(config.data.num_microbatches, layout.replicas)
    order = _order(config, share)
    if order.graph.shared:
        raise ValueError("--as-configured knows schedules of one direction: take another schedule")
    shape = PlanShape(
        num_stages=layout.num_stages,
        num_microbatches=share,
        data=layout.replicas,
        tensor=layout.tensor,
        mesh=tuple(book.mesh.items()),
        microbatch_size=config.data.microbatch_size,
        remat=layout.remat,
    )
    cut = CutModel(
        costs=book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=shape.remat),
        counts=_counts(config, order.placement.num_chunks),
        placement=order.placement,
        num_microbatches=share,
        split=bool(order.graph.split),
        replicas=layout.replicas,
    )
    return PlanCandidate(
        choice=PlanChoice(
            shape=shape, cut=cut, is_even=layout.layout is None, ordering=_ordering(config, order),
            order_name=layout.schedule or order.label,
        ),
        order=order,
        memory=tuple(forecast_memory(order, dict(enumerate(cut.chunk_bytes)), share)),
    )  # fmt: skip


def encoder_notes(config: TrainConfig | None) -> tuple[str, ...]:
    """Returns a note where stages of the encoder have a mesh of their own."""
    mesh = None if config is None else config.pipeline.encoder_mesh
    if mesh is None:
        return ()
    return (f"the encoder's stages have a mesh of their own, {describe_axes(tuple(mesh.items()))}",)


def _order(config: TrainConfig, share: int) -> core.Order:
    """Returns the order; that of a model with an encoder is a chain of its chunks, as if every microbatch had
    images."""
    layout, ordering = config.pipeline, ordering_of(config.pipeline)
    if config.vision is None:
        return order_of(layout, ordering, share)
    from rrfp_jax.commands.training.model_parts import placement_of

    placement, _ = placement_of(layout)
    return ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=share,
        chunks_per_stage=layout.chunks_per_stage,
        placement=placement,
    )


def _encoder_counts(config: TrainConfig, num_chunks: int) -> tuple[int, ...]:
    """Returns the layers of each of the encoder's chunks and the projector's own, ends included; the decoder's first
    chunk may have the projector instead."""
    assert config.vision is not None
    layout = config.pipeline
    counts = [*(layout.cut.encoder_layers or balanced_counts(config.vision.num_layers_run, num_chunks))]
    counts[0] += 1
    counts[-1] += layout.projector_in == ENCODER
    return (*counts, *[1] * (layout.projector_in == OWN_CHUNK))


def _counts(config: TrainConfig, num_chunks: int) -> tuple[int, ...]:
    """Returns the layers of each chunk, ends included."""
    layout = config.pipeline
    if config.vision is None:
        return _decoder_counts(config, num_chunks)
    from rrfp_jax.commands.training.model_parts import placement_of

    of_encoder = _encoder_counts(config, placement_of(layout)[1])
    first, *others = _decoder_counts(config, num_chunks - len(of_encoder))
    return (*of_encoder, first + (layout.projector_in == DECODER), *others)


def _decoder_counts(config: TrainConfig, num_chunks: int) -> tuple[int, ...]:
    from rrfp_jax.planner.small_cut import types_of_plans

    cut = config.pipeline.cut
    if cut.embedding_chunk != 0 or cut.head_chunk not in (-1, num_chunks - 1):
        raise ValueError(
            "--as-configured knows the embedding in the first chunk and the head in the last: put them there"
        )
    counts = cut.layers
    if config.vision is not None and counts is None:  # a decoder behind an encoder need not be cut evenly
        counts = tuple(balanced_counts(config.model.num_layers, num_chunks))
    plans = plan_cut(config.model.num_layers, num_chunks=None if counts else num_chunks, layers_per_chunk=counts)
    return tuple(map(len, types_of_plans(plans)))


def _ordering(config: TrainConfig, order: core.Order) -> core.Ordering:
    ordering = ordering_of(config.pipeline).on(order.table)
    return ordering if ordering.hint or order.table is not None else replace(ordering, hint="bf")
