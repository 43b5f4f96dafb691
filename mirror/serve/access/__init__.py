"""Who may read: users, logins, certificates, and who may connect."""
