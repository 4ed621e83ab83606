"""What the control plane costs the busiest rank does not grow with the number of ranks."""

import io

from rich.console import Console

from experiments import bench_control
from rrfp_jax.layout import CONTROL_DEGREE


def test_messages_and_connections_of_the_busiest_rank_do_not_grow(monkeypatch):
    monkeypatch.setattr(bench_control, "NUM_RANKS", (16, 256))
    shown = io.StringIO()
    small, large = bench_control.bench_control(Console(file=shown, width=120))
    assert "a gathering" in shown.getvalue()
    assert large.step.num_sent == small.step.num_sent <= 2 * CONTROL_DEGREE
    assert large.step.num_received == small.step.num_received <= 2 * CONTROL_DEGREE + 2
    assert large.gathering.num_sent == small.gathering.num_sent <= CONTROL_DEGREE + 1
    assert large.num_connections <= 16
    per_rank = (large.step.received_bytes - small.step.received_bytes) / 240
    assert per_rank < 12 + 12 + 1  # a norm and a peak, each with its number, and lengths
    assert small.failure is not None
