"""Batch files: requests in OpenAI's JSON-lines format, answered by a running endpoint into a file of answers."""
