"""Every bound of a batch file, in one place."""

MOST_LINE_BYTES = 64 << 20     # of one request: an endpoint takes less (max-body-bytes)
MOST_REQUESTS = 10_000_000
MOST_ID_CHARACTERS = 512       # of a custom_id
MOST_CONCURRENCY = 4096
SHOWN_PROBLEMS = 20            # bad lines that an error names; the others are counted

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
