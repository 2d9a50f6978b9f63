"""Parallel text from released files to batches of ids."""
