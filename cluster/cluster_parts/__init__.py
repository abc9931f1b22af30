"""What the programs of this folder share: a part for each, or for a topic."""
