"""From the configuration of a training run to the run itself, and what it shows."""
