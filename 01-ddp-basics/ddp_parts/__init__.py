"""What the lessons of module 01 prove, count and draw."""
