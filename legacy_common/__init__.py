"""What the scripts share and no lesson teaches, one file per topic."""

__version__ = "0.3.0"
