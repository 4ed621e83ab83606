"""What all commands share: options, errors, words, orders, and their part in a run of several processes."""
