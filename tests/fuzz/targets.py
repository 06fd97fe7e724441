"""All targets, by name."""

import fuzz_http
import fuzz_ipc
import fuzz_parsers

TARGETS = {target.name: target for target in (fuzz_http.TARGET, fuzz_parsers.TARGET, fuzz_ipc.TARGET)}
