#!/bin/sh
# venv.sh DIR [PYTHON]: make a virtual environment in DIR with PYTHON, or with the first Python here that is new enough.
set -eu

directory=$1
minimum='3, 11'
usable() { "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < ($minimum))" >/dev/null 2>&1; }
new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < ($minimum))" >/dev/null 2>&1; }

python= bare=
for candidate in ${2:+"$2"} ${2:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if usable "$candidate"; then python=$candidate; break; fi
    if new_enough "$candidate"; then bare=${bare:-$candidate}; fi
done

if [ -z "$python" ]; then
    {
        if [ -n "$bare" ]; then
            version=$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            echo "error: $bare (Python $version) cannot make virtual environments: its venv or ensurepip module is missing."
            echo "  Debian, Ubuntu:  sudo apt-get install python$version-venv"
            echo "  Others:          install the package that completes this Python, or name another one:"
        else
            echo "error: Atoll needs Python 3.11 or newer${2:+, and $2 is not one}; none was found."
            echo "  Debian 12, Ubuntu 24.04:  sudo apt-get install python3 python3-venv"
            echo "  Fedora, RHEL 9:           sudo dnf install python3.12"
            echo "  If it is installed but not on the PATH:"
        fi
        echo "                   make demo PYTHON=/path/to/python3"
    } >&2
    exit 1
fi

echo "Making the virtual environment $directory with $("$python" --version) …"
"$python" -m venv "$directory"
