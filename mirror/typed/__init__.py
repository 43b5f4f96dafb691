"""Documents as Arrow columns: metadata, and fields of JSON bodies as a user's schema names them.

Knows stored rows, not their origin. Only a schema with the type variant needs PySpark. `rows` makes batches of stored
rows. `ddl.fields_of(text)` makes a schema, `bodies.Bodies(schema, reading)` a parser for it, and
`Bodies.columns(bodies, datatypes, keys)` turns binary arrays of documents into one typed array for each column.
"""
