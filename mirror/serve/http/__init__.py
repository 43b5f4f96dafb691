"""Documents, changes and status over HTTP."""
