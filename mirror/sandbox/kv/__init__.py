"""The answers of the embedded source to a client: login, documents, sub-documents, statistics; no sockets."""
