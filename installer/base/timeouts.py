"""How long an install, an upgrade or a rollback waits. An engine's first start compiles kernels and reads the weights
from the disk."""

START_TIMEOUT = 900.0   # seconds until the service must be ready; after them an upgrade goes back
SMOKE_TIMEOUT = 300.0   # seconds for the first answer of a model
DRAIN_TIMEOUT = 30.0    # seconds that the running requests of a removed model get
