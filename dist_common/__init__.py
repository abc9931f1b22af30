"""What the scripts of the guide share and no lesson teaches: one file per topic."""

__version__ = "0.3.0"
