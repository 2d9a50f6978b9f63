"""Floor 0: specs, registries, trees of tensors, seeds and files. Knows nothing of attention."""
