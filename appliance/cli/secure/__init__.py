"""`atoll --help`, Secure: signatures, trusted keys, API keys, certificates, the audit log."""
