"""The one writer of a group: staging, publishing, rollback and the work between commits."""
