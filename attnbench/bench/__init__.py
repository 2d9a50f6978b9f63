"""How fast mechanisms, training and decoding are on this machine: what `attnbench speed` measures."""
