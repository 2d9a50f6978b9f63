"""How tokenised text becomes ids: one file a kind of vocabulary."""
