"""How long a start may take. An engine's first start compiles kernels and reads the weights from the disk."""

START_TIMEOUT = 900.0   # seconds until the service must be ready; after them an upgrade goes back
SMOKE_TIMEOUT = 300.0   # seconds for the first answer of a model
