"""The data of the embedded source: documents, their versions, collections, users, the cluster map; no connections."""
