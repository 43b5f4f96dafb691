"""The answers of the sandbox to a client: login, documents, sub-documents, statistics; no sockets."""
