"""Ranks that train small models in several layouts, one after another, and write down what each came to.

The first case takes all ranks and meets at the launcher's rendezvous. Later ones may take fewer ranks, the lowest, and
meet at rendezvous that rank 0 hosts; so several layouts share one start of processes. JAX starts as the cases need it,
or jointly if told so.
"""

import argparse
import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rrfp_jax.cluster import ClusterConfig, Membership, RendezvousServer, RunKey
from rrfp_jax.runtime.cluster import Cluster, join, membership_from
from tests.multiprocess.cases import Case, read_cases, result_file
from tests.runtime.logged_runs import replays_as_recorded

PATIENCE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the cases are, and where results go")
    parser.add_argument("--together", action="store_true", help="start JAX jointly though no case needs it")
    arguments = parser.parse_args()
    folder, cases = arguments.folder, read_cases(arguments.folder)
    together = arguments.together or any(case.layout.needs_collectives() for case in cases)
    own = membership_from(os.environ)
    assert own is not None
    with _more_rendezvous(own, cases[1:], folder) as addresses:
        for number, case in enumerate(cases):
            if own.rank < case.num_ranks:
                place = own if not number else replace(own, num_ranks=case.num_ranks, rendezvous=addresses[number - 1])
                num_devices = max(case.layout.devices_per_rank for case in cases)
                result = _train(case, place, num_devices=num_devices, together=together)
                result_file(folder, case, own.rank).write_bytes(pickle.dumps(result))


@contextmanager
def _more_rendezvous(own: Membership, cases: Sequence[Case], folder: Path) -> Iterator[list[str]]:
    """Addresses, one for each case; the servers are rank 0's."""
    file = folder / "addresses"
    with ExitStack() as stack:
        if not own.rank:
            key = RunKey.from_environment()
            servers = [RendezvousServer(case.num_ranks, key, deadline_s=10 * PATIENCE_S) for case in cases]
            for server in servers:
                stack.enter_context(server)
            unfinished = folder / "addresses.new"
            unfinished.write_text("\n".join(server.address for server in servers))
            unfinished.rename(file)
        while not file.exists():
            time.sleep(0.05)
        yield file.read_text().split()


def _train(case: Case, place: Membership, *, num_devices: int, together: bool) -> Any:
    """Losses, and the pieces of all parameters that lie here, by layer and path."""
    import jax

    from rrfp_jax.runtime.process import Process
    from tests.multiprocess.models import RAGGED, buckets_of, edges_of, make_batches, make_chunks, make_optimizer
    from tests.pipelines import make_pipeline

    jax.config.update("jax_disable_most_optimizations", not case.options.get("deterministic", False))
    patience = ClusterConfig(silence_deadline_s=PATIENCE_S, start_deadline_s=PATIENCE_S)
    cluster = join(place, case.as_dict(), patience, together=together)
    _start_jax_once(cluster, num_devices)
    process = Process(case.layout, cluster, transport=case.transport, patience_s=PATIENCE_S)
    process.connect()
    process.start_jax("cpu")
    _check_start(place, together=together)
    pipeline = make_pipeline(
        make_chunks(case),
        placement=case.placement,
        edges=edges_of(case),
        process=process,
        optimizer=make_optimizer(case),
        **({"clip_norm": 1.0} | _options(case)),
    )
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        results, batches = [], make_batches(case)
        pipeline.prepare(batches[0], buckets=buckets_of(case))
        for batch in batches:
            state, metrics = pipeline.step(state, batch, left_out=case.left_out)
            results.append(metrics)
        losses = [metrics.result().loss for metrics in results]
        if case.model == RAGGED:
            for batch, one in zip(batches, results, strict=True):
                _check_skipped(batch, one.result().timeline, case.data)
        pieces = [_pieces(held.params) for _, held in pipeline.chunk_states(state)]
        if case.options.get("offload"):
            assert all(map(replays_as_recorded, pipeline.runtime.logs().values()))
            if not process.rank:
                result, forecast = metrics.result(), pipeline.forecast[0]
                assert 0 < result.peak_host_bytes[0] <= forecast.host_peak
                assert result.peak_memory_bytes[0] <= forecast.peak
        if case.delay_ms:
            _check_announcements(pipeline, process, metrics.result().sums.looking_ahead)
    process.finish()
    return losses, pieces


def _check_skipped(batch: Any, timeline: Any, num_replicas: int) -> None:
    """Encoders have no task for microbatches that lack what they read, whichever replica these belong to."""
    for span in timeline.spans:
        kind, chunk, microbatch = span.task
        leaf = {0: "images", 1: "sounds"}.get(chunk // num_replicas)
        assert leaf is None or microbatch < 0 or batch[leaf][microbatch] is not None, (kind, chunk, microbatch)


def _options(case: Case) -> dict[str, Any]:
    from rrfp_jax.runtime.operations import device_slots, offload
    from rrfp_jax.testing import DelayedStage

    options = dict(case.options)
    if name := options.get("schedule"):
        options["schedule"] = table = _table(case, name)
        if slots := options.pop("offload", 0):
            options |= {"schedule": offload(table, slots, copy_ms=0.01), "window": device_slots(table, slots)}
    if case.delay_ms:
        options["wrap_stage"] = lambda stage: DelayedStage(stage, lambda *_: case.delay_ms / 1e3)
    return options


def _table(case: Case, name: str) -> Any:
    from rrfp_jax.schedules import PipelineGraph, ScheduleRequest, build_schedule
    from tests.multiprocess.models import edges_of, num_microbatches

    share = num_microbatches(case) // case.data
    request = ScheduleRequest(num_stages=case.num_stages, num_microbatches=share)
    if case.stage_of_chunk:
        graph = PipelineGraph(len(case.stage_of_chunk), share, tuple(edges_of(case) or ()))
        request = replace(request, graph=graph, placement=case.placement)
    return build_schedule(name, request)


def _check_announcements(pipeline: Any, process: Any, looking_ahead: int) -> None:
    """Announcements go from the leader of a stage's processes to that of another's, and every log can be replayed."""
    from rrfp_jax.core import Announce, TaskAnnounced

    for unit, log in pipeline.runtime.logs().items():
        entries = [entry for segment in log.segments for entry in segment.entries]
        leads = process.members()[unit][0] == 0
        assert any(isinstance(event, TaskAnnounced) for event, _ in entries) == leads, (unit, process.rank)
        assert any(isinstance(answer, Announce) for _, answers in entries for answer in answers) == leads
        assert replays_as_recorded(log)
    if not process.rank:
        assert looking_ahead == process.layout.num_units


def _start_jax_once(cluster: Cluster, num_devices: int) -> None:
    """JAX can be started once only, with as many devices as the largest case needs."""
    import jax

    from rrfp_jax.private.jax_names import backends_are_initialized

    if backends_are_initialized():
        cluster.initialize_jax = lambda *_, **__: tuple(jax.local_devices())  # type: ignore[method-assign]
    else:
        start = cluster.initialize_jax
        cluster.initialize_jax = lambda platform, _, **options: start(platform, num_devices, **options)  # type: ignore[method-assign]


def _check_start(place: Membership, *, together: bool) -> None:
    """A process with a JAX of its own has started nothing of ``jax.distributed``, and nobody offers it."""
    import jax

    from rrfp_jax.private.jax_names import global_state

    host, port = place.coordinator.rsplit(":", 1)
    with socket.socket() as asking:
        is_served = not asking.connect_ex((host, int(port)))
    told = (jax.process_index(), jax.process_count() > 1, global_state.client is not None, is_served)
    assert told == ((place.rank, True, True, True) if together else (0, False, False, False))


def _pieces(params: Any) -> dict[tuple[str, ...], tuple[tuple[int, ...], list[Any]]]:
    """By path, the shape of a parameter and its shards: where each begins and ends, and its values."""
    import jax
    import numpy as np

    return {
        tuple(key.key for key in path): (
            leaf.shape,
            [
                (
                    [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)],
                    np.array(shard.data),
                )
                for shard in leaf.addressable_shards
            ],
        )
        for path, leaf in jax.tree.leaves_with_path(params)
    }


if __name__ == "__main__":
    main()
