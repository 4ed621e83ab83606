"""The planner behind ``rrfp plan``: from the costs of layers to the best cut, order and memory, ranked by forecast."""
