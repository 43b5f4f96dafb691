"""The setting `readers_group`: which group of the system may read the data directory.

Knows the setting; what rights that means for which file, the store knows.
"""

from __future__ import annotations

from mirror.config import Settings
from mirror.errors import ConfigError
from storage.env import access
from storage.errors import StorageError


def readers_gid(settings: Settings) -> int | None:
    """The number of the group; None where the setting is unset. Raises ConfigError where it cannot be used."""
    if settings.readers_group is None:
        return None
    try:
        return access.group_id(settings.readers_group)
    except StorageError as error:
        raise ConfigError(error.message, hint=error.hint, setting="readers_group") from None
