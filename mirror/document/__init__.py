"""Documents taken apart and looked into, for requests that read a store or memory."""
