"""A mirror or its source as a data source of PySpark; and the pipelines."""
