"""Training runs: from the configuration to the run itself and its output."""
