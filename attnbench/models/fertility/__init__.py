"""Fertilities: how much attention each source word may receive in all. One file a kind; each registers itself."""
