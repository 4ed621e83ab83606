"""Two ranks that share a stage, of which rank 1 has another model in one respect, which it names."""

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.cluster import join, membership_from

PATIENCE_S = 60.0
DIFFERENCES = ("partition", "computation", "compiled", "optimizer", "parameters", "steps", "nothing")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("difference", choices=DIFFERENCES)
    difference = parser.parse_args().difference
    place = membership_from(os.environ)
    assert place is not None
    cluster = join(place, {}, ClusterConfig(silence_deadline_s=PATIENCE_S, start_deadline_s=PATIENCE_S))
    from rrfp_jax.runtime.process import Process

    process = Process(Layout(num_stages=1, tensor=2, num_ranks=2), cluster, patience_s=PATIENCE_S)
    process.connect()
    process.start_jax("cpu")
    if difference == "compiled":  # as if compilers made different programs of equal ones
        from rrfp_jax.runtime import prepare as prepared

        prepared.planned_work = lambda model, planned: ()
    _train(process, difference if place.rank else "nothing")
    process.finish()


def _train(process: Any, difference: str) -> None:
    import jax
    import optax

    from rrfp_jax.pipeline import Pipeline
    from rrfp_jax.schedules import linear
    from tests.multiprocess.cases import Case
    from tests.multiprocess.models import make_batches, make_chunks

    case = Case(name="", model="untied", cut=(1,), num_stages=1, tensor=2, num_ranks=2)
    (chunk,) = make_chunks(case)
    if difference == "partition":
        cut = chunk.partition
        assert cut is not None
        chunk = replace(chunk, partition=lambda params, axes: _whole_up(cut(params, axes)))
    elif difference in ("computation", "compiled"):
        apply = chunk.apply

        def twice(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
            (loss, weight), (again, _) = (apply(p, inputs, leaves, key=key) for p in (params, _halved(params)))
            return loss + again, weight

        chunk = replace(chunk, apply=twice)
    elif difference == "parameters":
        init = chunk.init
        chunk = replace(chunk, init=lambda key: _halved(init(key)))
    optimizer = optax.sgd(0.2 if difference == "optimizer" else 0.1)
    with Pipeline([chunk], placement=linear(1), process=process, optimizer=optimizer) as pipeline:
        state = pipeline.init(jax.random.key(0))
        if difference == "steps":
            state = pipeline.restore([held for _, held in pipeline.chunk_states(state)], 7)
        try:
            pipeline.prepare(make_batches(case)[0])
        except ValueError as error:
            print(f"refused: {error}", file=sys.stderr)
            return
        state, metrics = pipeline.step(state, make_batches(case)[0])
        print(f"trained: {metrics.result().loss}", file=sys.stderr)


def _whole_up(partition: Any) -> Any:
    from jax.sharding import PartitionSpec

    layer = partition["layers.0"]
    return partition | {"layers.0": layer | {"mlp": layer["mlp"] | {"up": {"kernel": PartitionSpec()}}}}


def _halved(params: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: leaf / 2, params)


if __name__ == "__main__":
    main()
