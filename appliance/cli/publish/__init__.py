"""`atoll --help`, Publish: on a connected PC. Bundles, media, and the vendor's keys."""
