"""Queries that try to leave the mirror: files, environment, network, extensions, settings, other databases, memory.

Statements but SELECT are refused by their kind, table functions unless they are listed: a few of each kind are here.

`{folder}` holds secret.csv, .json, .txt, .parquet and .duckdb; `{port}` is a server that no query may reach. A user may
read the default collection alone, and the collection `shop.salaries` exists.
"""

from __future__ import annotations

FILES = (
    "SELECT * FROM '{folder}/secret.csv'",
    'SELECT * FROM "{folder}/secret.csv"',
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_text('{folder}/secret.txt')",
    "SELECT * FROM read_text('/proc/self/environ')",
    "SELECT * FROM read_parquet('{folder}/secret.parquet')",
    "SELECT * FROM read_duckdb('{folder}/secret.duckdb', table_name='t')",
    "DESCRIBE SELECT * FROM '{folder}/secret.csv'",
    "SUMMARIZE '{folder}/secret.csv'",
    "EXPLAIN ANALYZE SELECT * FROM '{folder}/secret.csv'",
    "SELECT (SELECT content FROM read_text('{folder}/secret.txt'))",
    "WITH t AS MATERIALIZED (FROM read_csv('{folder}/secret.csv')) FROM t",
    "SELECT * FROM documents, LATERAL (SELECT * FROM read_text(documents._key))",
    "PIVOT '{folder}/secret.csv' ON a",
)

WRITES = (
    "COPY (SELECT 1) TO '{folder}/made.csv'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/made.csv'",
    "EXPORT DATABASE '{folder}/made'",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{folder}/secret.duckdb' AS other",
    "USE memory",
    "CREATE VIEW v AS SELECT * FROM documents",
    "CREATE MACRO m(a) AS TABLE SELECT * FROM read_text(a)",
    "DROP VIEW documents",
    "INSERT INTO documents SELECT * FROM documents",
    "MERGE INTO documents USING documents AS o ON documents._key = o._key WHEN MATCHED THEN DELETE",
    "SELECT 1; COPY (SELECT 1) TO '{folder}/made.csv'",
    "SELECT 1 /* ; */; SELECT * FROM read_text('{folder}/secret.txt')",
    "VACUUM",
)

ENVIRONMENT = (
    "SELECT getenv('PATH')",
    "INSTALL httpfs",
    "LOAD '{folder}/secret.duckdb_extension'",
    "SELECT * FROM 'http://127.0.0.1:{port}/secret.csv'",
    "SELECT * FROM read_parquet('s3://bucket/secret.parquet')",
    "SELECT * FROM sqlite_scan('{folder}/secret.sqlite', 't')",
    "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "SET enable_external_access = true",
    "SET GLOBAL allowed_paths = ['/']",
    "SET log_query_path = '{folder}/made.log'",
    "SET SESSION search_path = 'shop'",
    "PRAGMA profiling_output = '{folder}/made.json'",
    "CALL enable_logging(storage = 'file', storage_path = '{folder}/made')",
    "SELECT * FROM create_external_resource('a')",
    "PREPARE p AS SELECT * FROM read_text('{folder}/secret.txt')",
    "EXECUTE p",
)

POINTERS = (
    "SELECT * FROM arrow_scan(1::POINTER, 1::POINTER, 1::POINTER)",
    "SELECT * FROM python_arrow_scan(1::POINTER)",
    "SELECT * FROM pandas_scan(140000000000000::UBIGINT::POINTER)",
    "SELECT * FROM seq_scan(1::POINTER)",
    "SELECT * FROM os",
    "SELECT * FROM view",
)
"""Functions that take an address of memory, and names of variables in Python."""

INDIRECT = (
    "SELECT * FROM query('FROM read_text(''{folder}/secret.txt'')')",
    "SELECT * FROM query_table('{folder}/secret.csv')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{folder}/secret.txt'')'))",
    "PRAGMA json_execute_serialized_sql('{{}}')",
)

REFUSED = FILES + WRITES + ENVIRONMENT + POINTERS + INDIRECT
"""Each is an error, and nothing happens."""

OTHERS = (
    "SELECT * FROM shop.salaries",
    'SELECT * FROM "shop"."salaries"',
    'SELECT * FROM "shop.salaries"',
    "SELECT * FROM memory.shop.salaries",
    "SELECT * FROM query_table('shop.salaries')",
    "SELECT * FROM query('SELECT * FROM shop.salaries')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM shop.salaries'))",
    "SELECT * FROM shop.salarie",
    "SELECT * FROM salaries",
    "SUMMARIZE shop.salaries",
    "SHOW TABLES FROM shop",
    "SHOW ALL TABLES",
    "SHOW TABLES",
    "SELECT * FROM duckdb_tables()",
    "SELECT * FROM duckdb_columns()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM pg_catalog.pg_class",
    "SELECT current_setting('home_directory')",
    "SELECT current_query()",
    "SELECT value FROM documents WHERE _key = 'secret'",
    "SELECT * FROM documents WHERE _collection = 'shop.salaries'",
    "EXPLAIN SELECT * FROM shop.salaries",
)
"""Each is an error or an answer, and shows nothing of another collection, of a file, a path or a variable."""
