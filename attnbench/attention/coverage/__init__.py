"""Coverage: a feature of each key that tells the score what the key has received. One file a mechanism."""
