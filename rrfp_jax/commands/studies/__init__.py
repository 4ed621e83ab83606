"""The parts of ``rrfp simulate`` that studies use too: durations, graphs, machines, and reports."""
