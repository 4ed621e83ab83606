"""Commands that a user runs: ``python -m experiments.train`` and its neighbours."""
