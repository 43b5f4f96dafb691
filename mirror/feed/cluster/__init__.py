"""The source's nodes: discovery, the cluster map, the connections, and queries of all nodes."""
