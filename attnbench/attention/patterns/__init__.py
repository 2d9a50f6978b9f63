"""Patterns: who may look at whom before any data is seen. One file a mechanism; each registers itself."""
