"""The parallel corpora that `prepare` knows, one file each."""
