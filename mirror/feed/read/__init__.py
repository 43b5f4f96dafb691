"""Reading from the source in other processes: each vbucket up to a given seqno, into a spool."""
