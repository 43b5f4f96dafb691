"""A worker's consumer: it follows the vbuckets of its groups and stores them."""
