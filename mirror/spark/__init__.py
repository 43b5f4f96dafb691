"""A mirror, or any DCP producer, as a data source of PySpark; and the pipelines."""
