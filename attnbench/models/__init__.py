"""Floor 2: the sequence-to-sequence models, each behind the interface of models.base."""
