"""Commands as modules of the checkout, ``python -m experiments.train`` and its neighbours, and the benches."""
