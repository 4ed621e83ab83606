"""One file per family: its names for tensors, what its configuration leaves out, and what sets it apart."""
