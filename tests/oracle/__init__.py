"""A second, independent reading of the protocol: which message may come in which state. Recordings and goldens are held
against it; the program itself does not use it.
"""
