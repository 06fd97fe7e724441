"""Times in UTC, as records, reports and file names write them."""

import secrets
import time


def timestamp(seconds: float | None = None) -> str:
    """2026-01-31T14:05:00Z; by default now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def compact_timestamp() -> str:
    """Now, as it fits into file names: 20260131T140500Z."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def new_run_id(purpose: str = "") -> str:
    """When the run began, and random digits, because two may begin in one second: 20260131T140500Z-reset-1f0c9a."""
    return "-".join(part for part in (compact_timestamp(), purpose, secrets.token_hex(3)) if part)
