"""Words that libraries look up with gettext themselves, under `libraries_in` (installer/base/i18n.py), and those of the
operating system. Listed here for the catalogue; tests/appliance/cli/language/test_library_words.py finds them there.
"""

from installer.base.i18n import foreign

TYPER = (
    foreign("Missing command."),
    foreign("Arguments"),
    foreign("Options"),
    foreign("Commands"),
    foreign("Aborted!"),
    foreign("required"),
    foreign("default: {default}"),
)
TYPER_PLAIN = (foreign("Show this message and exit."),)  # not marked there: help_texts.py looks it up

ARGPARSE = (
    foreign("usage: "),
    foreign("options"),
    foreign("invalid choice: %(value)r (choose from %(choices)s)"),
    foreign("invalid %(type)s value: %(value)r"),
    foreign("expected one argument"),
    foreign("expected at least one argument"),
    foreign("ignored explicit argument %r"),
)

SYSTEM = (  # beside those of offline_bundle/text.py
    foreign("Address already in use"),
    foreign("Cannot assign requested address"),
    foreign("Name or service not known"),
)
