"""What layers do, from what chunks of them do."""

from rrfp_jax.costs.fitting import ChunkWork, TaskWork, fit_work


def test_a_layer_is_the_difference_of_chunks_and_an_end_is_its_chunk() -> None:
    found = fit_work(
        [
            ChunkWork(layer="layer", count=1, work={"F": TaskWork(110.0, 60.0), "W": TaskWork(5.0, 7.0)}),
            ChunkWork(layer="layer", count=3, work={"F": TaskWork(310.0, 40.0), "W": TaskWork(25.0, 17.0)}),
            ChunkWork(layer="layer", count=3, work={"B": TaskWork(300.0, 30.0)}),
            ChunkWork(layer="head", count=1, work={"F": TaskWork(7.0, 8.0)}),
        ]
    )
    assert found["layer"]["F"] == TaskWork(100.0, 0.0)  # fewer bytes with more layers: nothing
    assert found["layer"]["W"] == TaskWork(10.0, 5.0)
    assert found["layer"]["B"] == TaskWork(100.0, 10.0)
    assert found["head"]["F"] == TaskWork(7.0, 8.0)
    assert found["head"]["I"] == TaskWork()
