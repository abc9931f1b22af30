"""What the lessons of module 02 prove, count and draw."""
