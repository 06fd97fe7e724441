"""`atoll --help`, Install: from a bare server to a running service."""
