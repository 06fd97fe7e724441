"""Which content a model bundle may carry: safetensors weights, plain text and tokenizer data. No code, no pickles.

Applied when a bundle is built, and again after its hashes when it is verified or ingested. A signature says who made a
bundle; these rules keep even a trusted maker from shipping code by mistake.
"""

import codecs
import hashlib
import os
from collections.abc import Callable, Mapping

from offline_bundle import limits, names, untrusted_dir
from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.model import safetensors_header
from offline_bundle.model.manifest import BundleManifest, FileEntry, Role
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads
from offline_bundle.text import plain, t

_TEXT = (".json", ".jinja", ".txt", ".md", ".tiktoken")
_BINARY = (".model",)  # SentencePiece: a protobuf message
_LICENSE_NAMES = ("license", "licence", "copying", "notice", "use_policy", "copyright")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib", ".msgpack", ".h5", ".keras")
_CODE = (".py", ".pyc", ".pyi", ".ipynb", ".so", ".sh", ".js", ".dll", ".dylib", ".exe", ".whl", ".cu", ".ptx", ".pyd")

# First bytes of formats that can carry code, whatever the file's name.
_MAGIC = {
    b"PK\x03\x04": t("a zip archive (torch.save writes these: pickle)"),
    b"PK\x05\x06": t("a zip archive"),
    b"\x7fELF": t("an executable"),
    b"MZ": t("an executable"),
    b"#!": "a script",
    b"\x1f\x8b": t("a gzip archive"),
    b"\x93NUMPY": t("a numpy file"),
    b"\x89HDF": t("an HDF5 file"),
    b"GGUF": t("a GGUF file"),
    **{bytes([0x80, protocol]): "a pickle" for protocol in range(1, 6)},
}

# Keys by which upstream loaders would import code from the model directory.
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})
# Data, not configuration: keys are vocabulary entries, and any word may be one.
_VOCABULARIES = ("model/tokenizer.json", "model/vocab.json", "model/added_tokens.json")


def role_of(path: str) -> Role:
    """The role of `path` (below the bundle) by its name. Raises BundleError (content) when no role admits it."""
    folder, _, rest = path.partition("/")
    name = rest.rsplit("/", 1)[-1].lower()
    stem, dot, suffix = name.rpartition(".")
    suffix = dot + suffix if stem else ""
    if suffix in _PICKLES:
        raise _refused(path, t("may hold pickled objects, which run code when loaded"), t("Convert it to safetensors."))
    if suffix in _CODE:
        raise _refused(path, t("is code"), t("A bundle never carries code; leave it out with --exclude."))
    if folder == "sbom":
        role, allowed = "sbom", suffix == ".json"
    elif name.startswith(_LICENSE_NAMES):
        role, allowed = "license", suffix in ("", ".txt", ".md") or folder == "licenses" or not _known(suffix)
    elif folder == "licenses":
        role, allowed = "license", suffix == ".txt"
    elif suffix == ".safetensors":
        role, allowed = "weights", True
    elif suffix == ".jinja" or name == "chat_template.json":
        role, allowed = "template", True
    elif name.startswith(("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece")):
        role, allowed = "tokenizer", _known(suffix)
    elif suffix in (".model", ".tiktoken"):
        role, allowed = "tokenizer", True
    elif suffix == ".json":
        role, allowed = "config", True
    else:
        role, allowed = "doc", suffix in (".md", ".txt")
    if not allowed:
        raise _refused(path, t("is not a kind of file that a model bundle may hold"), t("Leave it out with --exclude."))
    return role


def _known(suffix: str) -> bool:
    return suffix in _TEXT or suffix in _BINARY


def check_file(fd: int, entry: FileEntry) -> None:
    """Check the open file against the rules for its name and role. Raises BundleError (content)."""
    expected = role_of(entry.path)
    if (expected == "weights") != (entry.role == "weights") or (expected == "template" and entry.role != "template"):
        raise _refused(
            entry.path,
            t("is listed as {role} but is {expected}", role=entry.role, expected=expected),
            t("Build the bundle again."),
        )
    if entry.role == "weights":
        if (why := safetensors_header.problem(fd)) is not None:
            raise _refused(
                entry.path,
                t("is not a valid safetensors file: {why}", why=names.show(why)),
                t("Download or convert it again."),
            )
        return
    start = os.pread(fd, 16, 0)
    for magic, what in _MAGIC.items():
        if start.startswith(magic) and not (magic == b"MZ" and start.isascii()):
            raise _refused(entry.path, t("is {what}", what=what), t("Leave it out, or replace it with the real "
                                                                    "file."))
    most = limits.MAX_TEXT[entry.role]
    parsed = entry.path.endswith(".json") and entry.path not in _VOCABULARIES
    if (size := os.fstat(fd).st_size) > (most := min(most, limits.MAX_PARSED) if parsed else most):
        raise _refused(
            entry.path,
            t("has {size} bytes; a file of its kind may have {most}", size=size, most=most),
            t("Leave it out with --exclude."),
        )
    if entry.path.endswith(_BINARY):
        return
    _check_text(fd, entry)
    if parsed:
        try:
            text = safetensors_header.read_exactly(fd, size, 0)
            loads(text, forbidden=_CODE_KEYS, constants=True)
        except StrictJSONError as e:
            raise _refused(
                entry.path,
                t("is refused: {why}", why=names.show(plain(e))),
                t("Keys that import code from the model directory are not allowed, and JSON must be unambiguous."),
            ) from e


def check_index(read: Callable[[str], bytes], files: Mapping[str, FileEntry]) -> None:
    """Every weight file that an index names must be in the bundle. Raises BundleError (content).

    `read(path)` returns a file's bytes (already bounded and checked by `check_file`).
    """
    for path in files:
        if not path.endswith(".safetensors.index.json"):
            continue
        index = loads(read(path), constants=True)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise _refused(path, t("has no weight_map"), t("Download it again."))
        folder = path.rpartition("/")[0]
        for shard in sorted(set(shards.values())):
            if f"{folder}/{shard}" not in files:
                raise _refused(
                    path,
                    t("names {shard}, which is not there", shard=names.show(shard)),
                    t("Download the missing shard."),
                )


def chat_template_sha256(read: Callable[[str], bytes], files: Mapping[str, FileEntry]) -> str | None:
    """SHA-256 of the chat template that is used. A template is code that runs on every prompt, so its hash is pinned.

    chat_template.jinja wins over chat_template.json over tokenizer_config.json; None when there is none.
    """
    if jinja := files.get("model/chat_template.jinja"):
        return jinja.sha256
    for path in ("model/chat_template.json", "model/tokenizer_config.json"):
        if path in files:
            config = loads(read(path), constants=True)
            template = config.get("chat_template") if isinstance(config, dict) else None
            if isinstance(template, str):
                return hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
            if template is not None:
                return hashlib.sha256(canonical(template)).hexdigest()
    return None


def check_model(root: int, manifest: BundleManifest) -> None:
    """Apply all rules to a bundle whose hashes hold: each file, then `check_whole`. Raises BundleError (content)."""
    for entry in manifest.files:
        with untrusted_dir.open_file(root, entry.path) as fd:
            check_file(fd, entry)
    check_whole(root, manifest)


def check_whole(root: int, manifest: BundleManifest) -> None:
    """The rules that span files: complete weight indexes and the pinned chat template."""
    files = {f.path: f for f in manifest.files}

    def read(path: str) -> bytes:
        return untrusted_dir.read_small(root, path, limits.MAX_PARSED)

    check_index(read, files)
    if chat_template_sha256(read, files) != manifest.chat_template_sha256:
        raise BundleError(
            t("The chat template is not the one that bundle.json pins."), t("Build the bundle again."), CONTENT
        )


def _check_text(fd: int, entry: FileEntry) -> None:
    """UTF-8 without NUL, read block by block, so that memory does not grow with the file."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        while block := os.pread(fd, limits.BLOCK, at):
            at += len(block)
            if b"\0" in block:
                what = t("has binary content where text is expected")
                raise _refused(entry.path, what, t("Leave it out with --exclude."))
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        raise _refused(entry.path, t("is not UTF-8 text"), t("Leave it out with --exclude.")) from e


def _refused(path: str, why: str, hint: str) -> BundleError:
    return BundleError(t("{path} {why}.", path=names.show(path), why=why), hint, CONTENT)
