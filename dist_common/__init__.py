"""What every script of the guide needs and no script teaches; one file per noun."""

__version__ = "0.1.0"
