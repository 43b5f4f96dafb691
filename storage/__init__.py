"""The store: LMDB environments per vbucket group, and the views that read them. See FORMAT.md for every byte."""
