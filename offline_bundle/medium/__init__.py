"""What runs on a server before Atoll is installed: install.sh and setup_release.py.

The server has nothing but Python's standard library then, so these modules need nothing else. Each program is one file
on the medium; scripts.py lists its parts in order and joins them. Atoll applies the same rules with the same modules.
"""
