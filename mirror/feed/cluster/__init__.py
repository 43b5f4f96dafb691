"""The source's nodes: finding them, following the cluster map, the connections to them and questions to all of them."""
