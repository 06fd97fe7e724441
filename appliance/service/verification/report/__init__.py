"""The report of a verification: JSON for programs, Markdown to pass on, one HTML file to look at, in both languages."""

from appliance.service.verification.report.files import Written, write

__all__ = ["Written", "write"]
