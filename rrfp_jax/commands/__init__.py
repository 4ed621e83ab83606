"""The commands a user runs, ``rrfp COMMAND``: a module for each; what they share lies in the folders."""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # Python is about to run a command by `python -m`, which looks for modules in the current folder first. A file of
    # the user's there, such as queue.py or yaml.py, must not take the place of a module: the folder comes last.
    sys.path.append(sys.path.pop(0))
