from ds_config import *  # noqa: F403  both names, until every script imports from these two
from ds_setup import *  # noqa: F403
