"""The commands a user runs, ``rrfp COMMAND``: a module for each; the folders hold the code that they share."""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m` is about to run a command, and it looks for modules in the current folder first. A user's file there,
    # such as queue.py or yaml.py, must not take the place of a module, so the folder moves to the end.
    sys.path.append(sys.path.pop(0))
