"""What the lessons of module 03 prove, count and draw, and how they start DeepSpeed."""
