"""What is simulated and emulated: durations, graphs, workloads, machines; and the reports of it."""
