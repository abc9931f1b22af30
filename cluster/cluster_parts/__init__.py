"""Parts of the programs of this folder: one for each program, or for a topic."""
