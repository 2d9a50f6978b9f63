"""Transforms: scores -> weights. One file a mechanism; each registers itself."""
