"""Fast paths: attention computed otherwise than by its definition, with the same result."""
