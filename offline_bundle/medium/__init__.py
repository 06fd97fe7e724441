"""The parts of what the medium carries to start from, install.sh and setup_release.py: standard library only, because
the server has nothing else yet. offline_bundle/runtime/medium_scripts.py puts them together."""
