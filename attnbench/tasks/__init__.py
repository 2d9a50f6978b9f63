"""Floor 4: tasks bind data, loss, search and metrics."""
