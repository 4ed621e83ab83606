"""Pipelines from options by name, whatever record they belong to; so that a case of a test is one flat dictionary."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rrfp_jax.core import Ordering
from rrfp_jax.layout import Layout


def make_pipeline(chunks: Sequence[Any], **options: Any) -> Any:
    """A pipeline with these options, its own or those of its records; ``data``, ``tensor`` and ``mesh`` lay it out."""
    from rrfp_jax.pipeline import Pipeline  # not before the caller has chosen the devices
    from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
    from rrfp_jax.runtime.process import Process

    records = {
        name: record(**take(options, *(field.name for field in fields(record))))  # type: ignore[arg-type]
        for name, record in (("updates", UpdateRules), ("ordering", Ordering), ("options", RuntimeOptions))
    }
    degrees = take(options, "data", "tensor", "mesh", "replicas")
    if degrees:
        options["process"] = Process(Layout(num_stages=options["placement"].num_stages, **degrees))
    return Pipeline(chunks, **options, **records)


def take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options of these names, which leave ``options``."""
    return {name: options.pop(name) for name in names if name in options}
