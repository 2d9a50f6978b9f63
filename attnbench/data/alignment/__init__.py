"""Word alignments: learned from parallel text, symmetrised, read and written, counted as fertilities."""
