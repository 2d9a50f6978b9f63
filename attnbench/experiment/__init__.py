"""Floor 6: a spec becomes a grid of cells, each cell a run folder."""
