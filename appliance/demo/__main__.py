"""``python -m appliance.demo``: what ``make demo`` runs."""

import sys

from appliance.demo.run import main

sys.exit(main())
