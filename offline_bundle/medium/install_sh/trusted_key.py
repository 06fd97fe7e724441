"""Step 1 of install.sh: which key the operator trusts.

Only the key that is named now, if any; otherwise the installed ones; never a revoked one.
"""

import os

from offline_bundle.errors import MISSING, SPACE_IO, UNTRUSTED, USAGE
from offline_bundle.limits import MAX_KEY_FILE
from offline_bundle.medium.install_sh.arguments import digits
from offline_bundle.medium.install_sh.terminal import TAMPERED, refused
from offline_bundle.medium.language import reason, t
from offline_bundle.medium.p256 import KeyFormatError, load_public
from offline_bundle.names import show
from offline_bundle.on_medium import lies_on
from offline_bundle.signing.revoked_keys import check_folder, read_revoked


def read_key(path):
    """(point, fingerprint, text) of a public key file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(MAX_KEY_FILE)
        return (*load_public(text), text)
    except OSError as e:
        raise refused(
            MISSING, t("The key {path} cannot be read: {why}.", path=show(path), why=reason(e)), t("Check --trust-key.")
        ) from None
    except KeyFormatError as e:
        raise refused(
            UNTRUSTED,
            t("{path} is not a key that can be trusted: {why}.", path=show(path), why=e),
            t("Give vendor.pub."),
        ) from None


def installed_trust(options):
    """(directory of installed keys, whether it exists, fingerprint -> record of each revoked key)."""
    folder = os.path.join(options.root, "etc/atoll/trust")
    try:
        there = check_folder(folder, t)
        return folder, there, read_revoked(folder, t) if there else {}
    except (OSError, ValueError) as e:
        why = reason(e) if isinstance(e, OSError) else e
        raise refused(
            SPACE_IO,
            t("The trusted and revoked keys in {folder} cannot be relied on: {why}.", folder=folder, why=why),
            t("Nothing is verified until this is repaired. Who changed it? ls -la {folder}", folder=folder),
        ) from None


def installed_keys(folder):
    """fingerprint -> (point, text) of the installed keys."""
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith(".pub") and os.path.isfile(path) and not os.path.islink(path):
            if os.stat(path).st_mode & 0o022:
                raise refused(
                    SPACE_IO,
                    t("Other users may write to the key {path}.", path=show(path)),
                    t("Compare it with the vendor's letter, then: chmod go-w {path}", path=show(path)),
                )
            point, fingerprint, text = read_key(path)
            found[fingerprint] = (point, text)
    return found


def named_keys(options):
    """fingerprint -> (point, text) of the key files that the operator named. A file from the medium is refused."""
    found = {}
    for path in options.trust:
        if lies_on(path, options.medium):
            raise refused(
                UNTRUSTED,
                t("The key {path} lies on the medium; whoever changed the medium could have changed it too.",
                  path=show(path)),
                t("Obtain the vendor's key through a separate channel, or compare its fingerprint: --fingerprint "
                  "HEX"),
            )
        point, fingerprint, text = read_key(path)
        if options.fingerprint is not None and not fingerprint.startswith(options.fingerprint):
            raise refused(
                USAGE,
                t("{path} does not have the fingerprint that you named: it is {fingerprint}.", path=show(path),
                  fingerprint=fingerprint),
                t("Compare digit by digit with the vendor's letter. If they differ, do not use this medium."),
            )
        found[fingerprint] = (point, text)
    return found


def choose_key(options, claimed):
    """The trusted key that the signature claims to be made by: (point, text, fingerprint, whether it was named now).

    If the operator names a key, installed keys no longer count.
    """
    folder, there, revoked = installed_trust(options)
    if claimed in revoked:
        raise refused(
            UNTRUSTED,
            t("The medium is signed by the key {claimed}, which was revoked here at {at}: {why}.", claimed=claimed,
              at=show(revoked[claimed].get("at", "?")), why=show(revoked[claimed].get("reason", "?"))),
            t("Do not use this medium. Ask the vendor for one that is signed with the new key."),
        )
    files, said = named_keys(options), options.fingerprint
    if files:
        if claimed in files:
            return *files[claimed], claimed, True
        raise other_key_error(claimed, ", ".join(f"{f[:32]}..." for f in files))
    installed = installed_keys(folder) if there and said is None else {}
    if claimed in installed:
        return *installed[claimed], claimed, False
    if said is None and not installed.keys() - revoked.keys():
        said = ask_fingerprint()
    if said is None:
        raise refused(
            UNTRUSTED,
            t("The medium is signed by the key {claimed}, which is not trusted here.", claimed=claimed),
            t(
                "Trusted: {names}. If the vendor has announced a new key: --fingerprint HEX, with the digits from "
                "the vendor's letter.",
                names=", ".join(f"{f[:16]}..." for f in installed if f not in revoked),
            ),
        )
    if not claimed.startswith(said):
        raise other_key_error(claimed, said)
    path = os.path.join(options.medium, "vendor.pub")  # proves nothing by itself
    point, fingerprint, text = read_key(path)
    if fingerprint == claimed:
        return point, text, claimed, True
    raise refused(UNTRUSTED, t("vendor.pub on the medium is not the key that signed it."), TAMPERED)


def other_key_error(claimed, said):
    """The error for a medium that another key signed."""
    return refused(
        UNTRUSTED,
        t("The medium is signed by the key {claimed}, not by the one you named ({said}).", claimed=claimed, said=said),
        t("Compare digit by digit with the vendor's letter. If they differ, do not use this medium."),
    )


def ask_fingerprint():
    """Ask on the terminal. The medium's claim is not shown, because the digits must come from another channel."""
    nobody = refused(
        UNTRUSTED,
        t("No trusted key: this server trusts none yet, and none was named."),
        t("Name the vendor's key, obtained through another channel than this disk: --fingerprint HEX or --trust-key "
          "FILE"),
    )
    try:
        with open("/dev/tty", "rb+", buffering=0) as terminal:
            terminal.write(
                t("First install: type the fingerprint of the vendor's key, from the vendor's letter or by phone, "
                  "not from\nthis disk (64 hex digits, of which the first 32 are enough; or its words): ").encode()
            )
            text = terminal.readline(1024).decode("ascii", "replace")
    except OSError:
        raise nobody from None
    if not text.strip():
        raise nobody
    return digits(text)
