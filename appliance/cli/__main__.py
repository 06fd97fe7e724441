"""``python -m appliance.cli`` is the `atoll` command, for a checkout where it is not on the PATH."""

from appliance.cli import main

main()
