"""The service around the store, and the public door for other programs: `mirror.open_view(path)` reads a mirror."""

from storage.view import View, open_view

__version__ = "0.1.0"

__all__ = ["View", "__version__", "open_view"]
