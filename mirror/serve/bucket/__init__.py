"""The mirrored bucket as KV and DCP clients see it: their sessions, its documents, seqnos and map."""
