"""The stored bytes: keys, rows, checksums and tokens. FORMAT.md describes them."""
