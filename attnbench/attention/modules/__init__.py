"""Attention modules: what a model layer calls. One file a mechanism; each registers itself."""
