"""The name of the API key that a watcher makes for itself. A pilot does not hold it back."""

KEY = "atoll top"
