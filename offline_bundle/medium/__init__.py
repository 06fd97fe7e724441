"""What the medium carries to start from: install.sh (shell and p256.py and check.py) and setup_release.py, all of them
standard library only, because the server has nothing else yet."""
