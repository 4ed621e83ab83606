"""The commands a user runs, ``rrfp COMMAND``: a module for each; what they share lies in the folders."""
