"""Biases: what is added to the scores. One file a mechanism; each registers itself."""
