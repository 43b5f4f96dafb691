"""The stored bytes: keys, rows, seals and tokens. Opens nothing; FORMAT.md describes it."""
