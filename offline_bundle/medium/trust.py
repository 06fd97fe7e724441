"""Which key the operator trusts: named now, or installed before. A part of install.sh."""

import os

from offline_bundle.medium.arguments import digits
from offline_bundle.medium.check import MAX_KEY, MISSING, ODD, UNTRUSTED, Refused, show
from offline_bundle.medium.p256 import KeyFormatError, load_public
from offline_bundle.medium.words import reason, t


def read_key(path):
    """(point, fingerprint, text) of a public key file."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_KEY)
        return (*load_public(text), text)
    except OSError as e:
        raise Refused(
            MISSING, t("The key {path} cannot be read: {why}.", path=show(path), why=reason(e)), t("Check --trust-key.")
        ) from None
    except KeyFormatError as e:
        raise Refused(
            UNTRUSTED,
            t("{path} is not a key that can be trusted: {why}.", path=show(path), why=e),
            t("Give vendor.pub."),
        ) from None


def trusted_keys(options):
    """fingerprint -> (point, text, named by the operator now). A key that lies on the medium is refused."""
    found = {}
    folder = os.path.join(options.root, "etc/atoll/trust")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for path in (os.path.join(folder, name) for name in names if name.endswith(".pub")):
        if os.path.isfile(path) and not os.path.islink(path):
            point, fingerprint, text = read_key(path)
            found[fingerprint] = (point, text, False)
    for path in options.trust:
        if os.path.commonpath([os.path.realpath(path), options.medium]) == options.medium != "/":
            raise Refused(
                UNTRUSTED,
                t("The key {path} lies on the medium; whoever changed the medium could have changed it too.",
                  path=show(path)),
                t("Bring the vendor's key by another way, or compare its fingerprint: --fingerprint HEX"),
            )
        point, fingerprint, text = read_key(path)
        found[fingerprint] = (point, text, True)
    return found


def choose_key(options, claimed):
    """The trusted key that the signature claims to be made by: (point, text, fingerprint, named now)."""
    keys = trusted_keys(options)
    if claimed in keys:
        point, text, now = keys[claimed]
        return point, text, claimed, now
    said = options.fingerprint
    if said is None and not keys:
        said = ask_fingerprint()
    if said is not None and claimed.startswith(said):
        path = os.path.join(options.medium, "vendor.pub")  # worth nothing unless its fingerprint is the one said
        point, fingerprint, text = read_key(path)
        if fingerprint == claimed:
            return point, text, claimed, True
        raise Refused(UNTRUSTED, t("vendor.pub on the medium is not the key that signed it."), ODD)
    if said is not None:
        raise Refused(
            UNTRUSTED,
            t("The medium is signed by the key {claimed}, not by the one you named ({said}).", claimed=claimed,
              said=said),
            t("Compare digit by digit with the vendor's letter. If they differ, do not use this medium."),
        )
    raise Refused(
        UNTRUSTED,
        t("The medium is signed by the key {claimed}, which is not trusted here.", claimed=claimed),
        t(
            "Trusted: {names}. If the vendor has announced a new key: --fingerprint HEX, with the digits from his "
            "letter.",
            names=", ".join(f"{f[:16]}..." for f in keys),
        ),
    )


def ask_fingerprint():
    """From the terminal. What the medium claims is not shown: the digits must come from elsewhere."""
    nobody = Refused(
        UNTRUSTED,
        t("Nothing says whose medium this should be: this server trusts no key yet."),
        t("Give the vendor's key, got by another way than this disk: --fingerprint HEX or --trust-key FILE"),
    )
    try:
        with open("/dev/tty", "rb+", buffering=0) as terminal:
            terminal.write(
                t("First install: type the fingerprint of the vendor's key, from his letter or by phone, not from "
                  "this\ndisk (64 hex digits; the first 32 are enough): ").encode()
            )
            text = terminal.readline(1024).decode("ascii", "replace")
    except OSError:
        raise nobody from None
    if not text.strip():
        raise nobody
    return digits(text)
