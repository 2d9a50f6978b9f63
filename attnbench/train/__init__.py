"""Floor 5: one training loop, its optimisers, its saved state, its device."""
