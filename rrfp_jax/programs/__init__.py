"""The compiled programs of one chunk: forward, backward, gradient reduction and optimizer update."""
