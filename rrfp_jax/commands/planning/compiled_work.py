"""What a way to run the stages takes and holds, from its compiled programs, checked against the layers' own sizes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.commands.planning.compiled_chunks import CompiledChunks, compile_chunks
from rrfp_jax.commands.planning.model_layers import LayerType, ModelLayers, model_layers
from rrfp_jax.commands.planning.setting import Setting
from rrfp_jax.commands.planning.small_cut import named
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import LayerCosts
from rrfp_jax.costs.byte_fit import fit_bytes
from rrfp_jax.costs.fitting import Work, fit_work
from rrfp_jax.costs.roofline import Roofline
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.target import Target
from rrfp_jax.runtime.process import Process

_log = logging.getLogger(__name__)
_APART = 0.1
"""How far XLA's operations may be from the layers' own, as a share."""


@dataclass(frozen=True, kw_only=True)
class CompiledWay:
    """One way to run the stages."""

    setting: Setting
    chunks: CompiledChunks
    model: ModelLayers
    works: Mapping[str, Mapping[str, Work]]
    """By kind of layer and of task: as XLA says, or more where it misses something; from sizes where it is silent."""

    def costs(self, roofline: Roofline) -> dict[str, LayerCosts]:
        """By type, on this roofline."""
        held = fit_bytes(self.chunks.parts)
        return {named(kind, self.model.types): self._layer(kind, roofline, held[kind]) for kind in self.works}

    def _layer(self, kind: str, roofline: Roofline, held: Mapping[str, int]) -> LayerCosts:
        layer, tensor = self.model.types[named(kind, self.model.types)], self.setting.tensor
        ms = {task: roofline.task_ms(work.flops * tensor, work.moved_bytes) for task, work in self.works[kind].items()}
        sums = [roofline.sums_ms(number, layer.sizes.sum_bytes) for number in layer.sizes.sums]
        sent = roofline.sent_ms(layer.sizes)
        estimates: dict[str, Any] = {
            "temporaries_bytes": layer.sizes.temporaries_bytes,
            "more_temporaries_bytes": layer.sizes.more_temporaries_bytes,
        }
        return LayerCosts(
            forward_ms=ms["F"] + sums[0] + sent[0],
            input_gradient_ms=ms["I"] + (sums[1] + sent[1]) * layer.has_backward,
            weight_gradient_ms=ms["W"] + sent[2] * layer.trains,
            backward_ms=ms["B"] + (sums[1] + sent[1]) * layer.has_backward + sent[2] * layer.trains,
            update_ms=ms["U"],
            flops=sum(layer.sizes.flops.tasks(trains=layer.trains, has_backward=layer.has_backward)),
            **{**held, **({} if self.chunks.tells_memory else estimates)},
        )


def compiled_way(config: TrainConfig, setting: Setting, process: Process, *, progress: CompileProgress) -> CompiledWay:
    """Compile what tells it, on the devices of the process. Raises ValueError where model, data and setting do not
    fit."""
    target = Target.of(process.own_device(process.units[0]))
    model = model_layers(config, **setting._asdict(), target=target)
    chunks = compile_chunks(config, setting, process, progress=progress)
    if not chunks.tells_work:
        _log.warning("the backend does not say what programs do: operations and bytes come from the layers' sizes")
    if not chunks.tells_memory:
        _log.warning("the backend does not say what memory programs need: temporaries are estimated from sizes")
    works = {}
    for kind, seen in fit_work(chunks.work).items():
        own = _own_work(model.types[named(kind, model.types)], setting.tensor)
        works[kind] = {
            task: _checked(kind, task, seen[task], own[task], setting) if chunks.tells_work else own[task]
            for task in own
        }
    return CompiledWay(setting=setting, chunks=chunks, model=model, works=works)


def _own_work(layer: LayerType, tensor: int) -> dict[str, Work]:
    """By kind, on one device, from the layer's sizes."""
    flops = layer.sizes.tasks(trains=layer.trains, has_backward=layer.has_backward)
    runs = (True, layer.has_backward, layer.trains)
    moved = [each * does for each, does in zip(layer.sizes.moved_bytes, runs, strict=True)]
    own = {kind: Work(f / tensor / layer.sizes.sharing, b) for kind, f, b in zip("FIW", flops, moved, strict=True)}
    own["B"] = Work(own["I"].flops + own["W"].flops, own["I"].moved_bytes + own["W"].moved_bytes)
    return own | {"U": Work(0.0, 2.0 * layer.fixed_bytes * layer.trains)}


def _checked(kind: str, task: str, seen: Work, own: Work, setting: Setting) -> Work:
    if task in _TOLD and own.flops and abs(seen.flops / own.flops - 1) > _APART:
        _log.warning(
            "%s of a layer of type %s (%s): XLA counts %.3g operations, its sizes make %.3g; the larger counts",
            _TOLD[task],
            kind,
            setting.words,
            seen.flops,
            own.flops,
        )
    return Work(max(seen.flops, own.flops), seen.moved_bytes)


_TOLD = {"F": "the forward", "B": "the backward"}
