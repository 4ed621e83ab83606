"""Two replicas of one stage that count the bytes of arrays which they send in a step: of gradients, and of a share of
the parameters."""

import json
import os
import sys
from pathlib import Path

from rrfp_jax import Layout, Pipeline, Process, linear
from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.runtime.cluster import join, membership_from

STEPS = 4


def main() -> None:
    membership = membership_from(os.environ)
    assert membership is not None
    cluster = join(membership, {}, ClusterConfig())
    process = Process(Layout(num_stages=1, data=2, num_ranks=2), cluster)
    process.connect()
    process.start_jax("cpu")
    import jax
    import optax

    from rrfp_jax.runtime.options import UpdateRules
    from rrfp_jax.runtime.transports.messages import HeldBytes
    from tests.test_pipeline_sparse import byte_batches, byte_model

    num_sent = [0]
    add = HeldBytes.add

    def counted(held: HeldBytes, **changes: int) -> None:
        num_sent[0] += max(0, changes.get("sent", 0))  # It is taken off again when it has arrived.
        add(held, **changes)

    HeldBytes.add = counted  # type: ignore[method-assign, assignment]
    found = []
    for reduce in ({"share": 0.05, "tau": 1}, "messages"):
        num_sent[0] = 0
        pipeline = Pipeline(
            byte_model(1),
            optimizer=optax.sgd(0.1),
            placement=linear(1),
            process=process,
            updates=UpdateRules(reduce=reduce),
        )
        state = pipeline.init(jax.random.key(0))
        for batch in byte_batches(STEPS):
            state, metrics = pipeline.step(state, batch)
        metrics.result()
        found.append(num_sent[0] / STEPS)
        num_arrays = len(jax.tree.leaves(pipeline.params(state)))
        pipeline.close()
    Path(sys.argv[1], str(process.rank)).write_text(json.dumps([*found, num_arrays]))
    process.finish()


if __name__ == "__main__":
    main()
