"""The kit of all commands: options, errors, the console, orders, and the part of a process in a run."""
