"""The data of the sandbox: documents, their versions, collections, users, the cluster map; no connections."""
