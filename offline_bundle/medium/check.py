"""The second half of install.sh: trusts a key, holds the medium against it, and only then lets anything of it run.

    the operator's key or fingerprint -> model.sig -> bundle.json -> the exact set of files -> a private copy, hashed
    while it is written -> setup_release.py, from that copy -> atoll install

Nothing is read twice from the medium: what runs is the copy that was hashed, whatever the disk shows afterwards. Only
the standard library is used, and nothing of the medium is parsed before its signature or hash holds, except the
signature's own envelope. The same checks, for machines that have Atoll already: offline_bundle/runtime/verify.py.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from offline_bundle.medium.p256 import verify
from offline_bundle.medium.words import reason, t

USAGE, PREFLIGHT, UNTRUSTED, CONTENT, REPLAY, MISSING, SPACE_IO, BUSY, INTERRUPTED = 2, 3, 10, 11, 12, 13, 30, 75, 130
MIB = 1 << 20
MAX_SIGNATURE, MAX_MANIFEST, MAX_KEY, MAX_SMALL = 4 * MIB, 32 * MIB, 64 << 10, MIB
COPIES = min(4, os.cpu_count() or 1)  # at once
MAX_FILES, MAX_DEPTH, MAX_PATH, MAX_FILE = 4096, 4, 240, 1 << 40
FINGERPRINT_DIGITS = 32  # at least: 128 bits, which nobody finds a second key for
COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]{0,127}\Z")
HEX64 = re.compile(r"[0-9a-f]{64}\Z")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
ODD = t("The medium is damaged or was tampered with. Do not use it; get it again from its vendor.")
AGAIN = t("Copy the medium again from its source.")


class Refused(Exception):
    """Told to the operator: what happened, what to do, and the exit code."""

    def __init__(self, code, message, hint=""):
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def say(text=""):
    """One line on stderr; a terminal that has gone away does not stop the work."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show(text):
    """Untrusted text for a terminal: ASCII only, control characters escaped, short."""
    return ascii(str(text))[1:-1][:200]


class Progress:
    """Bytes done, on one line of a terminal, or a line every few seconds elsewhere."""

    def __init__(self, label, total):
        self.label, self.total, self.done, self.last = label, max(total, 1), 0, 0.0
        self.terminal, self.lock = sys.stderr.isatty(), threading.Lock()

    def add(self, count):
        with self.lock:
            self.at(self.done + count)

    def at(self, done):
        self.done = max(self.done, min(done, self.total))
        now = time.monotonic()
        if now - self.last < (0.2 if self.terminal else 5.0):
            return
        self.last = now
        text = t("{label}: {done} of {total} MiB ({percent} %)", label=self.label, done=self.done >> 20,
                 total=self.total >> 20, percent=100 * self.done // self.total)
        with contextlib.suppress(OSError, ValueError):
            print("\r" + text if self.terminal else text, end=" " if self.terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    def end(self, text):
        if self.terminal:
            say("\r\033[K" + text)
        else:
            say(text)


# -- the signature ----------------------------------------------------------------------------------------------------


def loads(data):
    """JSON without duplicate keys, NaN or other ambiguities."""

    def unique(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    def no_constant(word):
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_envelope(text):
    """(fingerprint it claims, payload, raw signature) of model.sig. All of it still untrusted."""
    try:
        bundle = loads(text)
        envelope = bundle["dsseEnvelope"]
        if bundle["mediaType"] != "application/vnd.dev.sigstore.bundle.v0.3+json":
            raise ValueError("unknown media type")
        if envelope["payloadType"] != "application/vnd.in-toto+json" or len(envelope["signatures"]) != 1:
            raise ValueError("unknown payload")
        hint = bundle["verificationMaterial"]["publicKey"]["hint"]
        if not isinstance(hint, str) or not HEX64.match(hint):
            raise ValueError("no key is named")
        payload = base64.b64decode(envelope["payload"], validate=True)
        return hint, payload, base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, binascii.Error) as e:
        raise Refused(UNTRUSTED, t("runtime/model.sig is not a signature ({why}).", why=show(e)), ODD) from None


def signed_resources(payload, raw, point):
    """path -> SHA-256, as the holder of the key signed it."""
    kind = b"application/vnd.in-toto+json"
    if not verify(point, raw, b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)):
        raise Refused(UNTRUSTED, t("The signature is not valid: model.sig was changed after it was made."), ODD)
    try:
        statement = loads(payload)
        predicate = statement["predicate"]
        how = predicate["serialization"]
        if (
            statement["_type"] != "https://in-toto.io/Statement/v1"
            or statement["predicateType"] != "https://model_signing/signature/v1.0"
            or (how["method"], how["hash_type"], how.get("allow_symlinks", False)) != ("files", "sha256", False)
        ):
            raise ValueError("another profile of the format")
        resources = {}
        for item in predicate["resources"]:
            path, digest = check_path(item["name"]), item["digest"]
            if path in resources or item["algorithm"] != "sha256" or not HEX64.match(digest):
                raise ValueError(f"{path} is listed in an odd way")
            resources[path] = digest
        root = hashlib.sha256(b"".join(bytes.fromhex(d) for d in resources.values())).hexdigest()
        if len(statement["subject"]) != 1 or statement["subject"][0]["digest"] != {"sha256": root}:
            raise ValueError("the root digest does not match")
        return resources
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise Refused(CONTENT, t("The signature holds, but what it signs is odd: {why}.", why=show(e)), ODD) from None


def check_path(path):
    """A relative path of a few plain ASCII steps, or ValueError."""
    steps = path.split("/")
    if len(path) > MAX_PATH or not 1 <= len(steps) <= MAX_DEPTH or not all(COMPONENT.match(step) for step in steps):
        raise ValueError(f"the path {show(path)} is not allowed")
    return path


def parse_manifest(data, resources):
    """bundle.json once its hash holds: canonical, of our kind, and naming the very files that were signed."""
    try:
        manifest = loads(data)
        if json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() != data:
            raise ValueError("it is not in canonical form")
        if manifest["kind"] != "runtime" or manifest["schema_version"] != 1:
            raise ValueError(f"it describes a bundle of the kind {show(manifest['kind'])}")
        if not re.match(r"[0-9][0-9A-Za-z.+-]{0,63}\Z", manifest["version"]) or type(manifest["sequence"]) is not int:
            raise ValueError("version or sequence is odd")
        listed = {check_path(f["path"]): f["sha256"] for f in manifest["files"]}
        if any(type(f["size"]) is not int or not 0 <= f["size"] < MAX_FILE for f in manifest["files"]):
            raise ValueError("a size is odd")
        if listed != resources or len(manifest["files"]) != len(listed) or len(listed) > MAX_FILES:
            raise ValueError("it and the signature name different files")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Refused(CONTENT, t("runtime/bundle.json is signed, but odd: {why}.", why=show(e)), ODD) from None


# -- the medium -------------------------------------------------------------------------------------------------------


def open_below(root, path):
    """A descriptor of the regular file `path` below the directory `root`, reached without following any link."""
    here = os.dup(root)
    try:
        *steps, name = path.split("/")
        for step in steps:
            below = os.open(step, DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        fd = os.open(name, REGULAR, dir_fd=here)
    except FileNotFoundError:
        raise Refused(MISSING, t("runtime/{path} is missing.", path=show(path)), AGAIN) from None
    except OSError as e:
        if e.errno in (20, 40, 6):  # ENOTDIR, ELOOP, ENXIO
            raise Refused(CONTENT, t("runtime/{path} is a link or a special file.", path=show(path)), ODD) from None
        raise Refused(
            SPACE_IO, t("runtime/{path} cannot be read: {why}.", path=show(path), why=reason(e)), AGAIN
        ) from None
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused(CONTENT, t("runtime/{path} is not a regular file.", path=show(path)), ODD)
    return fd


def read_small(root, path, limit):
    """The whole of a small file."""
    fd = open_below(root, path)
    try:
        with os.fdopen(fd, "rb") as file:
            data = file.read(limit + 1)
    except OSError as e:
        raise Refused(
            SPACE_IO, t("runtime/{path} cannot be read: {why}.", path=show(path), why=reason(e)), AGAIN
        ) from None
    if len(data) > limit:
        raise Refused(CONTENT, t("runtime/{path} is larger than it may be.", path=show(path)), ODD)
    return data


def walk(fd, prefix=""):
    """path -> size of every file below; a directory ends in '/'. Links and special files are refused."""
    found = {}
    for name in sorted(os.listdir(fd)):
        path = prefix + name
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            found[path] = info.st_size
        elif stat.S_ISDIR(info.st_mode) and path.count("/") < MAX_DEPTH:
            found[path + "/"] = 0
            below = os.open(name, DIRECTORY, dir_fd=fd)
            try:
                found.update(walk(below, path + "/"))
            finally:
                os.close(below)
        else:
            raise Refused(CONTENT, t("runtime/{path} is a link or a special file.", path=show(path)), ODD)
        if len(found) > 2 * MAX_FILES:
            raise Refused(CONTENT, t("The directory runtime holds far too many files."), ODD)
    return found


def check_file_set(root, sizes):
    """Exactly the signed files with the signed sizes, and no other file or directory."""
    try:
        there = walk(root)
    except OSError as e:
        raise Refused(SPACE_IO, t("The medium cannot be read: {why}.", why=reason(e)), AGAIN) from None
    directories = {path[: i + 1] for path in sizes for i, c in enumerate(path) if c == "/"}
    for path in sorted(there.keys() - sizes.keys() - directories):
        raise Refused(
            CONTENT,
            t("runtime/{path} is not part of what was signed.", path=show(path)),
            t("Delete it, or copy the medium again from its source."),
        )
    for path in sorted(sizes):
        if path not in there:
            raise Refused(MISSING, t("runtime/{path} is missing.", path=show(path)), AGAIN)
        if there[path] != sizes[path]:
            raise Refused(
                CONTENT,
                t("runtime/{path} has {found} bytes, not the {size} signed.", path=show(path), found=there[path],
                  size=sizes[path]),
                AGAIN,
            )


def copy_all(root, entries, target_of, progress):
    """Copy every file and hash what is written, or only hash it where `target_of(path)` is None.

    On a disk whose head has to move (most USB disks say so) one file after the other, elsewhere several at once.
    """
    stop = threading.Event()

    def work(entry):
        try:
            if not stop.is_set():
                copy_hashed(root, entry, target_of(entry["path"]), progress, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(1 if rotational(os.fstat(root).st_dev) else COPIES) as pool:
        try:
            list(pool.map(work, sorted(entries, key=lambda entry: -entry["size"])))
        except BaseException:
            stop.set()  # Ctrl-C comes here first
            raise


def rotational(device):
    """Whether Linux takes the block device for one with costly seeks."""
    base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (f"{base}/queue/rotational", f"{base}/../queue/rotational"):
        with contextlib.suppress(OSError), open(place) as file:
            return file.read().strip() == "1"
    return False


def copy_hashed(root, entry, target, progress, stop):
    """Copy one file, hashing what is written. A copy that an earlier run left is hashed instead of read again."""
    os.makedirs(os.path.dirname(target) if target else ".", 0o700, exist_ok=True)
    if target and os.path.isfile(target) and not os.path.islink(target) and os.stat(target).st_size == entry["size"]:
        with open(target, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]:
                return progress.add(entry["size"])
    digest, left = hashlib.sha256(), entry["size"] + 1
    source = open_below(root, entry["path"])
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600) if target else -1
    try:
        buffer = memoryview(bytearray(MIB))
        while left > 0 and not stop.is_set():
            try:
                block = buffer[: os.readv(source, [buffer[: min(MIB, left)]])]
            except OSError as e:
                raise Refused(
                    SPACE_IO, t("runtime/{path} cannot be read: {why}.", path=entry["path"], why=reason(e)), AGAIN
                ) from None
            if not block:
                break
            digest.update(block)
            left -= len(block)
            if target:
                view = block
                while view:
                    view = view[os.write(out, view) :]
            progress.add(len(block))
    finally:
        os.close(source)
        if target:
            os.close(out)
    if stop.is_set():
        return None  # another file was refused; this copy is of use to the next run, which hashes it again
    if left != 1 or digest.hexdigest() != entry["sha256"]:
        if target:
            os.unlink(target)
        raise Refused(CONTENT, t("runtime/{path} differs from what was signed.", path=entry["path"]), AGAIN)
    return None
