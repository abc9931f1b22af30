"""What the lessons of this module prove, count and draw: a part each, and their shared topics."""
