"""The command line of install.sh, and which of its options are for `atoll install`. A part of install.sh."""

import json
import os
import re
import tomllib

from offline_bundle.errors import USAGE
from offline_bundle.limits import MAX_SMALL_FILE
from offline_bundle.medium.install_sh.terminal import refused
from offline_bundle.medium.language import t
from offline_bundle.signing.hash_words import from_words

HELP = t("""\
Install Atoll from this medium.

  cp install.sh /root && cd /root && sha256sum install.sh     first: compare it with the vendor's letter
  sudo sh install.sh --medium DIR --fingerprint "1f2e 3d4c ..."   first install; the digits come from the letter, too
  sudo sh install.sh --medium DIR --trust-key vendor.pub      the same, with the vendor's key file, not from the disk
  sudo sh install.sh --medium DIR                             upgrade: the keys of the first install are trusted

Options:
  --fingerprint HEX      the vendor's key, by 32 or more digits of its fingerprint, or by its words (16 or more)
  --trust-key FILE       the vendor's key, as a file that does not come from the medium; repeatable
                         If you name a key, only that key counts; installed keys are ignored.
  --prefix DIR           install below DIR, without root; otherwise root is needed, and / is used
  --medium DIR           where the medium is (default: the directory of install.sh)
  --python DIR           a Python >= 3.11 that does not come from the medium (default: the server's python3)
  --verify-only          check the medium and stop; nothing is written
  --preflight            check the server against the medium and stop; nothing is kept
  --dry-run              show what would be done and stop; nothing is kept
  --allow-downgrade WHY  accept an older runtime than the installed one
  --answers FILE         an answers file of `atoll install` for an unattended install
  --lang ko|en           the language of messages (default: the system's)
  --help                 this text; `atoll install --help` explains all other options, which are passed on

This script came with the disk. It can check everything else on it, but not itself: compare its SHA-256 with the
vendor's letter before you start it, and start the copy that you compared.

Exit codes: 0 ok, 2 usage, 3 the server lacks something, 10 not trusted, 11 content differs, 12 older than installed,
13 something is missing, 30 space or I/O, 75 another install runs, 130 interrupted; others: `atoll install --help`.
""")
FINGERPRINT_DIGITS = 32  # the least: 128 bits, for which nobody can make a second key
OWN = ("--fingerprint", "--medium", "--python")  # with a value, not passed on
SHARED = ("--prefix", "--trust-key", "--answers", "--bundle", "--allow-downgrade")  # with a value, passed on


class Options:
    """The parsed arguments: those of install.sh itself, and those passed on to `atoll install`."""

    def __init__(self, script, arguments):
        self.values = {name: [] for name in (*OWN, *SHARED)}
        self.rest, self.verify_only, self.preflight, self.dry_run, self.help = [], False, False, False, False
        left = list(arguments)
        while left:
            word = left.pop(0)
            name, equals, value = word.partition("=")
            if name in self.values:
                if not equals:
                    if not left:
                        raise refused(USAGE, t("{name} needs a value.", name=name), t("Help: sh install.sh --help"))
                    value = left.pop(0)
                self.values[name].append(value)
                if name in ("--answers", "--bundle", "--allow-downgrade"):
                    self.rest += [name, os.path.abspath(value) if name == "--answers" else value]
            elif word in ("-h", "--help"):
                self.help = True
            elif word == "--verify-only":
                self.verify_only = True
            elif word == "--preflight":
                self.preflight = True
            else:
                self.dry_run = self.dry_run or word == "--dry-run"
                self.rest.append(word)
        self.answers = self._answers()
        self.medium = os.path.realpath(self.last("--medium") or os.path.dirname(os.path.abspath(script)))
        self.fingerprint = self._fingerprint()
        keys = self.values["--trust-key"] or (self.answers.get("trust_keys", []) if self.fingerprint is None else [])
        self.trust = [os.path.abspath(path) for path in keys]
        prefix = self.last("--prefix") or self.answers.get("prefix") or os.environ.get("ATOLL_PREFIX")
        self.prefix = os.path.realpath(os.path.expanduser(prefix)) if prefix else None

    def last(self, name):
        return self.values[name][-1] if self.values[name] else None

    def _answers(self):
        path = self.last("--answers")
        if path is None:
            return {}
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_SMALL_FILE).decode()
            answers = json.loads(data) if data.lstrip().startswith("{") else tomllib.loads(data)
            keys, prefix = answers.get("trust_keys", []), answers.get("prefix", "")
            if not isinstance(prefix, str) or not all(isinstance(key, str) for key in keys):
                raise ValueError("prefix or trust_keys is odd")
            return answers
        except (OSError, ValueError, TypeError, AttributeError) as e:
            raise refused(
                USAGE,
                t("The answers file {path} cannot be used: {why}.", path=path, why=e),
                t("Correct it and run again."),
            ) from None

    def _fingerprint(self):
        text = self.last("--fingerprint")
        return digits(text) if text is not None else None

    @property
    def root(self):
        """The directory that /opt and /etc are below."""
        return self.prefix or "/"


def digits(text):
    """A fingerprint as typed, in digits or words, as lower-case hex. Spaces, colons and capitals are ignored."""
    plain = re.sub(r"[\s:]", "", text).lower()
    if re.search(r"[g-z]", plain):
        try:
            plain = from_words(text)
        except ValueError as e:
            raise refused(
                USAGE,
                t("Word {number} of the fingerprint is not in the word list for its position.", number=e.args[0]),
                t("Words alternate between two and three syllables: one may be missing or repeated."),
            ) from None
    if not (FINGERPRINT_DIGITS <= len(plain) <= 64 and re.match(r"[0-9a-f]+\Z", plain)):
        raise refused(
            USAGE,
            t("A fingerprint has 64 hex digits or 32 words; give at least the first {digits} digits or {words} words.",
              digits=FINGERPRINT_DIGITS, words=FINGERPRINT_DIGITS // 2),
            t("The vendor sees it with: atoll keys fingerprint vendor.pub"),
        )
    return plain
