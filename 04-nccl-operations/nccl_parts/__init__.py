"""What the lessons of this module prove, count and draw: a part for each, or for a topic."""
