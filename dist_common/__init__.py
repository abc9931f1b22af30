"""The module that the scripts share: start with runtime.py."""

__version__ = "2.0.0"
