"""Floor 8: the commands. Heavy imports stand inside the functions, so that help is instant."""
