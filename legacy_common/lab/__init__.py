"""What proves, counts and draws, and what emulates a cluster: a copied script does without it."""
