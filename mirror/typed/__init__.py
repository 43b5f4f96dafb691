"""JSON documents as Arrow columns of a user's schema.

Knows neither Spark nor the store; only the type variant needs PySpark's encoder, when it is used. `ddl.fields_of(text)`
makes the schema, `bodies.Bodies(schema, reading)` a parser for it, and `Bodies.columns(bodies, datatypes, keys)` turns
binary arrays of documents into one typed array for each column.
"""
