"""Documents as Arrow columns: metadata, and fields of JSON bodies as a user's schema names them.

Only a schema with the type variant needs PySpark.
"""
