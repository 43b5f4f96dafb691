"""LMDB environments, their transactions and the data directory that holds them."""
