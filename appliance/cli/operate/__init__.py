"""`atoll --help`, Operate: look after a running service."""
