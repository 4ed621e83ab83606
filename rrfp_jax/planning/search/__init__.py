"""From costs to the best way to run a model: cut, order and memory, judged in virtual time."""
