"""A second, independent reading of the key-value protocol; the program itself does not use it."""
