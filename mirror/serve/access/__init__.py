"""Access: users, logins, certificates and connections."""
