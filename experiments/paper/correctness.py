"""Appendix E: is training the same as without a pipeline?

The paper compares trends of the loss. Here every step's loss and the final parameters are compared with a plain jitted
loop over the same microbatches; and in deterministic mode every bit with that of other orders, which take the same
backward: within one form of it (fused or split) nothing may differ. How far rounding alone drives two runs apart says
the plain loop itself, with the microbatches of each step summed in reverse.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.paper.emulated import use_devices
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import markdown
from rrfp_jax.schedules import PipelineGraph, linear

if TYPE_CHECKING:
    from rrfp_jax import Ordering, Pipeline

STAGES, NUM_MICROBATCHES, CLIP_NORM, LEARNING_RATE = 4, 8, 1.0, 1e-3
LANGUAGE, MULTIMODAL = "language", "text and images"
FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fused": {
        "bf": {"hint": "bf"},
        "1f1b strict": {"schedule": "1f1b", "consume": "strict"},
        "1f1b + foresight": {"schedule": "1f1b"},
    },
    "split": {
        "bfw": {"hint": "bfw"},
        "zb-h1 strict": {"schedule": "zb-h1", "consume": "strict"},
        "zb-h1 + foresight": {"schedule": "zb-h1"},
    },
}
"""Words of the orders, by the form of their backward."""
REVERSED = "the loop itself, summed in reverse"


class _Subject(NamedTuple):
    """A model, its data and its settings for training."""

    chunks: Sequence[Any]
    edges: Sequence[Any] | None
    data: Any
    buckets: Any


def cells(quick: bool) -> Sequence[Cell]:
    """Returns the cells of two models and several seeds."""
    seeds = range(1, 3 if quick else 4)
    models, steps = (LANGUAGE, MULTIMODAL), 60 if quick else 500
    return [{"model": model, "steps": steps, "seed": seed} for model in models for seed in seeds]


def measure(cell: Cell) -> Measured:
    """Measures the loop and every order."""
    use_devices(STAGES)
    seed = int(cell["seed"])
    with TemporaryDirectory() as folder:  # pictures are read from it in every step
        return _compared(_subject(str(cell["model"]), seed, Path(folder)), int(cell["steps"]), seed)


def _compared(subject: _Subject, steps: int, seed: int) -> Measured:
    """Returns a row for each order: how far it is from the loop."""
    rows: list[dict[str, Value]] = []
    plain: tuple[list[float], Any] | None = None
    for form, orders in FORMS.items():
        base: Pipeline | None = None
        for name, words in orders.items():
            ordering = _ordering(subject, words)
            base = _pipeline(subject, ordering) if base is None else base.reordered(ordering)  # what is compiled stays
            with base:
                start, losses, params = _train(base, subject, steps, seed)
            plain = plain or _train_plainly(subject, start, steps)
            rows.append({"method": name, "backward": form, **_differences(losses, params, *plain)})
    assert plain is not None
    backwards = _train_plainly(subject, start, steps, step=-1)
    return [*rows, {"method": REVERSED, "backward": "none", **_differences(*backwards, *plain)}]


def _subject(model: str, seed: int, folder: Path) -> _Subject:
    """Returns a model and its data, whose files are written to ``folder``."""
    from experiments.reading.draw import TRAIN, draw_data
    from rrfp_jax.data import ImageText, ImageTextConfig, TextBytes, TextConfig
    from rrfp_jax.models import LanguageModelConfig, language_model
    from rrfp_jax.models.encoder import PixelScale
    from rrfp_jax.models.vision_config import ProjectorConfig, VisionConfig, VisionLanguageConfig
    from rrfp_jax.models.vision_language import vision_language_model

    decoder = LanguageModelConfig(vocab_size=256, hidden=32, num_layers=STAGES, num_heads=2, mlp_dim=64)
    if model == LANGUAGE:
        data = TextBytes(TextConfig(length=32, batch_size=16, num_microbatches=NUM_MICROBATCHES, seed=seed))
        return _Subject(language_model(decoder).split(num_chunks=STAGES), None, data, None)
    vision = VisionConfig(
        hidden=16, num_layers=1, num_heads=2, mlp_dim=32, qkv_bias=False, patch_dim=64, max_rows=2, max_columns=8
    )
    config = VisionLanguageConfig(vision=vision, projector=ProjectorConfig(patches_per_feature=4), decoder=decoder)
    draw_data(folder, num_samples=2000, num_pictures=1000, num_held_out=0, max_images=2, text_only=0.3, seed=seed)
    grey: dict[str, Any] = {"channels": 1, "patch_size": 8, "mean": (1.0,), "std": (1.0,)}
    few: dict[str, Any] = {"text_buckets": 2, "image_buckets": 1}
    drawn = ImageText(
        ImageTextConfig(
            path=str(folder / TRAIN), batch_size=16, num_microbatches=NUM_MICROBATCHES, seed=seed, **few, **grey
        )
    )
    layers = (STAGES // (STAGES - 1) + 1, *[1] * (STAGES - 2))  # one chunk is the encoder's
    pixels = PixelScale(grey["mean"], grey["std"])
    graph = vision_language_model(config).split(packed=True, decoder_layers_per_chunk=layers, pixels=pixels)
    return _Subject(graph.chunks, graph.edges, drawn, drawn.buckets)


def _optimizer() -> Any:
    import optax

    return optax.adamw(LEARNING_RATE)


def _ordering(subject: _Subject, words: Mapping[str, Any]) -> "Ordering":
    from rrfp_jax.commands.common.ordering import OrderingOptions

    named = OrderingOptions(**words)
    graph = None if subject.edges is None else PipelineGraph(STAGES, NUM_MICROBATCHES, tuple(subject.edges))
    order = named.resolve(num_stages=STAGES, num_microbatches=NUM_MICROBATCHES, placement=linear(STAGES), graph=graph)
    return named.on(order.table)


def _pipeline(subject: _Subject, ordering: "Ordering") -> "Pipeline":
    from rrfp_jax import Pipeline, UpdateRules

    return Pipeline(
        subject.chunks,
        edges=subject.edges,
        placement=linear(STAGES),
        optimizer=_optimizer(),
        ordering=ordering,
        updates=UpdateRules(clip_norm=CLIP_NORM, deterministic=True),
    )


def _train(pipeline: "Pipeline", subject: _Subject, steps: int, seed: int) -> tuple[Any, list[float], Any]:
    """Returns the parameters at the start, the losses, and the parameters at the end."""
    import jax

    state = pipeline.init(jax.random.key(seed))
    start = jax.tree.map(np.array, pipeline.params(state))
    pipeline.prepare(subject.data.batch(0), buckets=subject.buckets)
    losses = []
    for step in range(steps):
        state, metrics = pipeline.step(state, subject.data.batch(step))
        losses.append(metrics.result().loss)
    return start, losses, jax.tree.map(np.array, pipeline.params(state))


def _train_plainly(subject: _Subject, params: Any, num_steps: int, step: int = 1) -> tuple[list[float], Any]:
    """Returns the losses and the final parameters of a loop without a pipeline: one jitted gradient for each shape.

    ``step`` is 1 where it sums microbatches from the first to the last, -1 the other way.
    """
    import jax
    import optax

    from rrfp_jax.testing import run_unpipelined

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), _optimizer())

    def loss(params: Any, leaves: Any) -> Any:
        return run_unpipelined(subject.chunks, params, leaves, edges=subject.edges)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))

    @jax.jit
    def update(params: Any, moments: Any, grads: Any, weight: Any) -> Any:
        updates, moments = optimizer.update(jax.tree.map(lambda grad: grad / weight, grads), moments, params)
        return optax.apply_updates(params, updates), moments

    moments, losses = optimizer.init(params), []
    for number in range(num_steps):
        total = weight = 0.0
        grads = jax.tree.map(np.zeros_like, params)
        for leaves in list(_microbatches(subject.data.batch(number)))[::step]:
            (summed, own), grad = gradient(params, leaves)
            total, weight, grads = total + float(summed), weight + float(own), jax.tree.map(np.add, grads, grad)
        params, moments = update(params, moments, grads, np.float32(weight))
        losses.append(total / weight)
    return losses, params


def _microbatches(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the leaves of each microbatch."""
    for m in range(NUM_MICROBATCHES):
        yield {name: leaf[m] for name, leaf in batch.items() if leaf[m] is not None}


def _differences(losses: Sequence[float], params: Any, plain_losses: Sequence[float], plain: Any) -> dict[str, Value]:
    import jax

    of_losses = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain_losses, strict=True))
    leaves = list(zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True))
    of_leaves = [np.linalg.norm(ours - np.asarray(theirs)) / (np.linalg.norm(theirs) or 1.0) for ours, theirs in leaves]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(ours).tobytes() for ours, _ in leaves)).hexdigest()
    return {
        "first_loss": round(losses[0], 6),
        "last_loss": round(losses[-1], 6),
        "loss_difference": f"{of_losses:.3e}",
        "leaf_difference": f"{max(of_leaves):.3e}",
        "bits": digest[:16],
    }


def write(rows: Rows, folder: Path) -> str:  # noqa: ARG001
    """Returns the section: the largest differences over seeds, and whether bits agree."""
    lines = []
    methods = [(name, form) for form, orders in FORMS.items() for name in orders] + [(REVERSED, "none")]
    for model in dict.fromkeys(row["model"] for row in rows):
        for name, form in methods:
            some = selected(rows, model=model, method=name)
            differences = (_farthest(some, what) for what in ("loss", "leaf"))
            fall = f"{float(some[0]['first_loss']):.2f} to {float(some[0]['last_loss']):.2f}"
            lines.append([model, name, form, fall, *differences])
    settings = {tuple((key, row[key]) for key in QUESTION.settings) for row in rows}
    runs = [selected(rows, **dict(cell)) for cell in settings]
    equal = sum(len({row["bits"] for row in selected(run, backward=form)}) == 1 for run in runs for form in FORMS)
    steps = " and ".join(sorted({row["steps"] for row in rows}, key=int))
    pipelined = [row for row in rows if row["method"] != REVERSED]
    return "\n\n".join(
        [
            markdown(["model", "order", "backward", "loss", "loss differs by", "a parameter differs by"], lines),
            f"Over {steps} steps and {len(runs)} runs no loss is farther from the plain loop's than "
            f"{_farthest(pipelined, 'loss')} of it; the loop itself, with the microbatches of each step summed in "
            f"reverse, comes as far as {_farthest(selected(rows, method=REVERSED), 'loss')}. In {equal} of "
            f"{len(runs) * len(FORMS)} comparisons all orders of one form of the backward end with the same bits in "
            "every parameter.",
            "*Threats*: small models on CPU devices; differences from the plain loop are those of summation in another "
            "order, which training makes larger as it goes on.",
        ]
    )


def _farthest(rows: Rows, what: str) -> str:
    return f"{max(float(row[f'{what}_difference']) for row in rows):.1e}"


QUESTION = Question(
    name="correctness",
    title="Is training the same? (appendix E)",
    settings=("model", "steps", "seed"),
    figures=("method", "backward", "first_loss", "last_loss", "loss_difference", "leaf_difference", "bits"),
    cells=cells,
    measure=measure,
    write=write,
    is_timed=True,
)
