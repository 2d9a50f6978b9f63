"""Scores: how alike a query and a key are. One file a mechanism; each registers itself."""
