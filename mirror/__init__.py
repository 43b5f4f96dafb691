"""The service around the store, and the public door for other programs: `mirror.open_view(path)` reads a mirror."""

from storage.errors import NotPublished, ViewInvalidated, WriteLost
from storage.view import View, open_view
from storage.wait import MutationToken

__version__ = "0.1.0"

__all__ = ["MutationToken", "NotPublished", "View", "ViewInvalidated", "WriteLost", "__version__", "open_view"]
