"""Documents by the key-value protocol."""
