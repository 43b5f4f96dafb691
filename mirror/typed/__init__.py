"""Documents as Arrow columns: their metadata, and JSON by a user's schema.

Knows stored rows, not their origin; only the type variant needs PySpark's encoder, when it is used. `rows` makes
batches of stored rows. `ddl.fields_of(text)` makes a schema, `bodies.Bodies(schema, reading)` a parser for it, and
`Bodies.columns(bodies, datatypes, keys)` turns binary arrays of documents into one typed array for each column.
"""
