"""What even a trusted signature does not excuse: code, pickles, hostile names, broken manifests and weights.

Every bundle here is validly signed by the trusted key, so each refusal comes from the content rules.
"""

import hashlib
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from bundle_kit import TEMPLATE, Made, build, forge, make_model, manifest_of, refused

from offline_bundle import limits, verify_bundle
from offline_bundle.model import content
from offline_bundle.model.manifest import FileEntry
from offline_bundle.model.versions import admits
from offline_bundle.signing import model_signing, signature_format
from offline_bundle.signing.keys import KeyPair, load_private
from offline_bundle.signing.strict_json import canonical
from offline_bundle.store.ingest import ingest

WEIGHTS = "model/model-00001-of-00002.safetensors"


def archive() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("archive/data.pkl", pickle.dumps({}))
    return out.getvalue()


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(*offsets: int, shape: tuple[int, ...] = (4,), dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# name → (path, content, role, words)
HOSTILE_FILES: dict[str, tuple[str, bytes, str, str]] = {
    "python": ("model/modeling_x.py", b"import os\n", "config", "is code"),
    "python in upper case": ("model/MODELING.PY", b"import os\n", "config", "is code"),
    "shared object": ("model/x.so", b"\x7fELF", "config", "is code"),
    "pickle by name .bin": ("model/pytorch_model.bin", archive(), "config", "pickled"),
    "pickle by name .pt": ("model/x.pt", archive(), "config", "pickled"),
    "pickle by name .pth": ("model/x.pth", archive(), "config", "pickled"),
    "pickle by name .ckpt": ("model/x.ckpt", archive(), "config", "pickled"),
    "pickle by name .pkl": ("model/x.pkl", pickle.dumps(1), "config", "pickled"),
    "pickle called a tokenizer": ("model/tokenizer.model", pickle.dumps({"a": 1}), "tokenizer", "is a pickle"),
    "torch.save called a tokenizer": ("model/tokenizer.model", archive(), "tokenizer", "zip archive"),
    "executable called text": ("docs/readme.txt", b"\x7fELF\x02\x01", "doc", "executable"),
    "script called text": ("docs/readme.txt", b"#!/bin/sh\n", "doc", "script"),
    "binary called json": ("model/special.json", b'{"a":"\0"}', "config", "binary"),
    "latin-1 called text": ("docs/readme.txt", b"\xe9t\xe9", "doc", "UTF-8"),
    "unknown kind": ("model/weights.gguf", b"GGUF", "config", "not a kind"),
    "auto_map": ("model/config.json", b'{"auto_map":{"AutoModel":"x.Y"}}', "config", "auto_map"),
    "auto_map deep inside": ("model/generation_config.json", b'{"a":[{"auto_map":{}}]}', "config", "auto_map"),
    "auto_map hidden by a duplicate": ("model/config.json", b'{"a":{"auto_map":1},"a":0}', "config", "auto_map"),
    "duplicate keys": ("model/config.json", b'{"a":1,"a":2}', "config", "duplicate key"),
    "bottomless json": ("model/config.json", b"[" * 200_000, "config", "config.json"),
    "pickle listed as weights": ("model/x.pt", archive(), "weights", "pickled"),
    "text listed as weights": ("model/x.json", b"{}", "weights", "listed as weights"),
    "weights listed as config": ("model/x.safetensors", safetensors({}), "config", "listed as config"),
    "huge header": (WEIGHTS, safetensors(b"{}", length=100_000_001), "weights", "100000001 bytes"),
    "header longer than file": (WEIGHTS, safetensors(b"{}", length=99), "weights", "longer than the file"),
    "too short": (WEIGHTS, b"\1\0", "weights", "too short"),
    "not json": (WEIGHTS, safetensors(b"{nope}"), "weights", "valid safetensors"),
    "not an object": (WEIGHTS, safetensors([1]), "weights", "'{'"),
    "offsets past the end": (WEIGHTS, safetensors({"a": tensor(0, 4)}, b"123"), "weights", "cover"),
    "bytes nobody owns": (WEIGHTS, safetensors({"a": tensor(0, 4)}, b"12345"), "weights", "cover"),
    "overlap": (WEIGHTS, safetensors({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456"), "weights", "overlap"),
    "gap": (WEIGHTS, safetensors({"a": tensor(0, 4), "b": tensor(6, 10)}, b"1234567890"), "weights", "gap"),
    "shape does not fit": (WEIGHTS, safetensors({"a": tensor(0, 4, shape=(5,))}, b"1234"), "weights", "fit its shape"),
    "negative shape": (WEIGHTS, safetensors({"a": tensor(0, 4, shape=(-2, -2))}, b"1234"), "weights", "impossible"),
    "shape that overflows": (WEIGHTS, safetensors({"a": tensor(0, 0, shape=(1 << 63,))}), "weights", "impossible"),
    "unknown dtype": (WEIGHTS, safetensors({"a": tensor(0, 4, dtype="PICKLE")}, b"1234"), "weights", "dtype"),
    "unhashable dtype": (WEIGHTS, safetensors({"a": {**tensor(0, 4), "dtype": []}}, b"1234"), "weights", "valid"),
    "tensor listed twice": (
        WEIGHTS,
        safetensors(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}', b"1"),
        "weights",
        "duplicate",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_content(case: str, made: Made, tmp_path: Path) -> None:
    path, data, role, words = HOSTILE_FILES[case]
    forge(made, {path: (data, role)})
    refused(11, words, lambda: verify_bundle(made.path, made.trusted))
    store = tmp_path / "store"
    refused(11, words, lambda: ingest(made.path, made.trusted, store))
    left = [p.name for p in store.glob("*") if p.name != ".lock"] if store.exists() else []
    assert left == [], "nothing of a refused bundle stays in the store"


def first_file(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda m: m["files"][0].update(changes)


# name → (edit of the manifest, words)
BROKEN_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown key": (lambda m: m.update(extra=1), "extra"),
    "missing key": (lambda m: m.pop("sequence"), "sequence"),
    "null sequence": (lambda m: m.update(sequence=None), "sequence"),
    "sequence as text": (lambda m: m.update(sequence="5"), "sequence"),
    "sequence as bool": (lambda m: m.update(sequence=True), "sequence"),
    "sequence 0": (lambda m: m.update(sequence=0), "sequence"),
    "huge sequence": (lambda m: m.update(sequence=1 << 60), "sequence"),
    "newer schema": (lambda m: m.update(schema_version=2), "needs a newer Atoll"),
    "other kind": (lambda m: m.update(kind="runtime"), "kind"),
    "remote code": (lambda m: m.update(remote_code=True), "remote_code"),
    "other weights": (lambda m: m.update(weights_format="pickle"), "weights_format"),
    "bad version": (lambda m: m.update(version="1.0"), "version"),
    "name with a path": (lambda m: m.update(name="../x"), "name"),
    "name with a newline": (lambda m: m.update(name="tiny\n"), "name"),
    "escape codes in the source": (lambda m: m["source"].update(repo="\x1b[31m"), "source.repo"),
    "no such licence": (lambda m: m["license"].update(file="licenses/x.txt"), "licence"),
    "other licence text": (lambda m: m["license"].update(sha256="0" * 64), "licence"),
    "too few chunks": (lambda m: next(f for f in m["files"] if f["path"] == WEIGHTS)["chunks"].pop(), "cover"),
    "upper-case hash": (lambda m: first_file(sha256="A" * 64)(m), "sha256"),
    "tiny chunks": (first_file(chunk_size=1), "chunk_size"),
    "role in another room": (first_file(role="weights"), "does not belong"),
    "unsorted files": (lambda m: m["files"].reverse(), "order"),
    "no weights": (lambda m: m.update(files=[f for f in m["files"] if f["role"] != "weights"]), "no weights"),
    "other template pinned": (lambda m: m.update(chat_template_sha256="0" * 64), "chat template"),
    "template not pinned": (lambda m: m.update(chat_template_sha256=None), "chat template"),
}


@pytest.mark.parametrize("case", BROKEN_MANIFESTS)
def test_broken_manifest(case: str, made: Made) -> None:
    edit, words = BROKEN_MANIFESTS[case]
    forge(made, edit=edit)
    before = {f["path"] for f in json.loads((made.path / "bundle.json").read_bytes())["files"]}
    for path in list(made.path.rglob("*.safetensors")):
        if str(path.relative_to(made.path)) not in before:
            path.unlink()
    refused(11, words, lambda: verify_bundle(made.path, made.trusted))


@pytest.mark.parametrize(
    "encode",
    [
        lambda m: canonical(m) + b"\n",
        lambda m: json.dumps(m, indent=1).encode(),
        lambda m: b'{"kind":"model",' + canonical(m)[1:],
        lambda m: canonical(m).replace(b'"sequence":5', b'"sequence":5.0'),
        lambda m: canonical(m).replace(b'"name":"tiny"', b'"name":"tin\\u0079"'),
        lambda m: canonical(m).replace(b'"sequence":5', b'"sequence":NaN'),
        lambda m: canonical(m).replace(b'"tiny"', b'"\\ud800"'),
        lambda m: canonical(m)[:-1],
        lambda m: b"\xef\xbb\xbf" + canonical(m),
        lambda m: b"[" * 100_000,
        lambda m: canonical(m).replace(b'"sequence":5', b'"sequence":' + b"9" * 5000),
    ],
    ids=["newline", "indented", "duplicate", "float", "escape", "nan", "surrogate", "cut", "bom", "deep", "digits"],
)
def test_manifest_has_one_spelling(encode: Callable[[Any], bytes], made: Made) -> None:
    forge(made, encode=encode)
    refused(11, "bundle.json", lambda: verify_bundle(made.path, made.trusted))


HOSTILE_PATHS = [
    "../escape.json", "/etc/passwd.json", "model/../../x.json", "model/./x.json", "model//x.json", "model\\x.json",
    "model/a\nb.json", "model/a\0b.json", "model/" + "x" * 300 + ".json", "model/a/b/c/d/x.json", "model/.hidden.json",
    "model/-rf.json", "model/x.json.", "model/con.json", "model/été.json", "model/e\u0301.json",
    "model/\u202egnp.json", "model/a b.json", "C:/x.json", ".git/x.json", "model/.gitignore", "elsewhere/x.json",
    "x.json",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=[ascii(p)[:40] for p in HOSTILE_PATHS])
def test_hostile_paths_in_a_signed_manifest(path: str, made: Made, tmp_path: Path) -> None:
    entry = {"path": path, "size": 0, "role": "config", "chunk_size": 65536, "chunks": []}
    entry["sha256"] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

    def add(manifest: dict[str, Any]) -> None:
        manifest["files"] = sorted([*manifest["files"], entry], key=lambda f: f["path"])

    store = tmp_path / "store"
    forge(made, edit=add)
    refused(11, "", lambda: ingest(made.path, made.trusted, store))
    forge(made, edit=add, resources=lambda r: r.pop(path) and None)  # the manifest alone must be refused as well
    refused(11, "", lambda: ingest(made.path, made.trusted, store))
    assert not (tmp_path / "escape.json").exists()


@pytest.mark.parametrize(
    ("first", "second"), [("model/Readme.md", "model/README.md"), ("model/A/x.md", "model/a/x.md")]
)
def test_names_that_differ_by_case_only(first: str, second: str, made: Made) -> None:
    forge(made, {first: (b"1", "doc"), second: (b"2", "doc")})
    refused(11, "collide", lambda: verify_bundle(made.path, made.trusted))


def test_a_shard_that_the_index_names_must_be_there(made: Made) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00003-of-00003.safetensors"}}
    forge(made, {"model/model.safetensors.index.json": (json.dumps(index).encode(), "config")})
    refused(11, "model-00003-of-00003", lambda: verify_bundle(made.path, made.trusted))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["resources"][0].update(algorithm="blake3"), "sha256"),
        (lambda p: p["resources"][0].update(algorithm="sha1", digest="0" * 40), "sha256"),
        (lambda p: p["serialization"].update(hash_type="blake3"), "hash_type"),
        (lambda p: p["serialization"].update(method="shards"), "method"),
        (lambda p: p["serialization"].update(allow_symlinks=True), "symlinks"),
        (lambda p: p["resources"].append(p["resources"][0]), "twice"),
        (lambda p: p["resources"].pop(), "root digest"),
        (lambda p: p.update(resources=None), "profile"),
        (lambda p: p.pop("serialization"), "profile"),
    ],
)  # fmt: skip
def test_signed_statement_outside_our_profile(
    change: Callable[[dict[str, Any]], Any], words: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = signature_format.canonical

    def spoil(value: Any) -> bytes:
        if "predicate" in value:
            change(value["predicate"])
        return real(value)

    monkeypatch.setattr(signature_format, "canonical", spoil)
    forge(made)
    monkeypatch.undo()
    refused(11, words, lambda: verify_bundle(made.path, made.trusted))


def test_manifest_and_signature_must_name_the_same_files(made: Made) -> None:
    forge(made, resources=lambda r: r.pop(WEIGHTS) and None)
    refused(11, "disagree", lambda: verify_bundle(made.path, made.trusted))
    forge(made, resources=lambda r: r.update({"model/ghost.json": "0" * 64}))
    refused(11, "ghost", lambda: verify_bundle(made.path, made.trusted))
    forge(made, resources=lambda r: r.pop("bundle.json") and None)
    refused(11, "does not cover", lambda: verify_bundle(made.path, made.trusted))


def test_chunks_and_whole_hash_must_agree_when_asked_for_everything(made: Made) -> None:
    def lie(manifest: dict[str, Any]) -> None:
        next(f for f in manifest["files"] if f["path"] == WEIGHTS)["sha256"] = "0" * 64

    forge(made, edit=lie)
    refused(11, "disagree", lambda: verify_bundle(made.path, made.trusted, full=True))


def test_replay_is_refused_before_any_file_is_read(made: Made, tmp_path: Path) -> None:
    (made.path / WEIGHTS).unlink()
    refused(12, "sequence 5", lambda: verify_bundle(made.path, made.trusted, min_sequence=6))
    refused(12, "replayed", lambda: ingest(made.path, made.trusted, tmp_path / "store", min_sequence=6))


def test_same_or_newer_sequence_is_fine(pristine: Made) -> None:
    for minimum in (None, 0, 4, 5):
        verify_bundle(pristine.path, pristine.trusted, min_sequence=minimum)


def test_oversized_signature_and_manifest_are_not_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = (made.path / "model.sig").read_bytes()
    (made.path / "model.sig").write_bytes(signature + b" " * limits.MAX_SIGNATURE)
    refused(10, "larger than", lambda: verify_bundle(made.path, made.trusted))
    (made.path / "model.sig").write_bytes(signature)
    monkeypatch.setattr(limits, "MAX_MANIFEST", 100)
    refused(11, "larger than", lambda: verify_bundle(made.path, made.trusted))


def test_nothing_of_the_statement_is_parsed_before_the_signature_holds(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    real = signature_format.loads
    monkeypatch.setattr(signature_format, "loads", lambda data: (parsed.append(data), real(data))[1])
    key = load_private(made.keys.private_path)
    signature = model_signing.sign({"a": "0" * 64}, "x", key)
    (made.path / "model.sig").write_bytes(signature.replace(b'"sig":"ME', b'"sig":"MF'))
    refused(10, "", lambda: verify_bundle(made.path, made.trusted))
    assert parsed == [(made.path / "model.sig").read_bytes()]


# The builder applies the same rules to a model directory.
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("modeling.py", b"x", "is code"),
        ("pytorch_model.bin", archive(), "pickled"),
        (".gitattributes", b"x", "git"),
        ("weights.gguf", b"GGUF", "not a kind"),
        ("tokenizer.model", pickle.dumps(1), "is a pickle"),
        ("generation_config.json", b'{"auto_map":{}}', "auto_map"),
        ("model-00001-of-00002.safetensors", b"\x80\x02}q\0.", "valid safetensors"),
        ("été.md", b"x", "characters outside"),
    ],
)
def test_the_builder_refuses_too(name: str, data: bytes, words: str, vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "src", kib=1)
    (model / name).write_bytes(data)
    refused(11, words, lambda: build(model, tmp_path / "out", vendor))
    assert list((tmp_path / "out").glob("*")) == []


def test_template_pin_follows_the_template_in_force(vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "src", kib=1)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    first = manifest_of(build(model, tmp_path / "a", vendor))
    assert first.chat_template_sha256 == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    (model / "chat_template.jinja").unlink()
    second = manifest_of(build(model, tmp_path / "b", vendor))
    assert second.chat_template_sha256 == hashlib.sha256(b"other").hexdigest()
    (model / "tokenizer_config.json").write_text("{}")
    assert manifest_of(build(model, tmp_path / "c", vendor)).chat_template_sha256 is None


# -- what a bundle asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [("runtime", "0.1"), ("runtime", ">=0.1, <0.2"), ("runtime", ">=0.1,"), ("runtime", ""), ("runtime", "~=0.1"),
     ("driver_min", "new"), ("cuda", "thirteen"), ("compute_cap", "sm_90"), ("compute_cap", "9.0\n")],
)  # fmt: skip
def test_a_requirement_that_nobody_can_judge_is_refused(made: Made, name: str, value: str) -> None:
    forge(made, edit=lambda manifest: manifest["requires"].update({name: value}))
    refused(11, f"requires.{name}", lambda: verify_bundle(made.path, made.trusted))


def test_a_requirement_of_a_later_atoll_is_told_as_such(made: Made) -> None:
    forge(made, edit=lambda manifest: manifest["requires"].update({"numa_nodes": 2}))
    error = refused(11, "needs a newer Atoll", lambda: verify_bundle(made.path, made.trusted))
    assert "numa_nodes" in error.message


def test_a_later_format_is_told_as_such(made: Made) -> None:
    forge(made, edit=lambda manifest: manifest.update(schema_version=2, signed_by="x"))
    refused(11, "needs a newer Atoll", lambda: verify_bundle(made.path, made.trusted))


@pytest.mark.parametrize(
    "versions, inside, outside",
    [(">=0.1,<0.2", ["0.1.0", "0.1.99", "0.1.0rc1"], ["0.2.0", "0.0.9", "1.1.0"]), ("==1.2.3", ["1.2.3"], ["1.2.4"]),
     (">1", ["1.0.1", "2.0.0"], ["1.0.0", "0.9"]), ("!=0.1.5", ["0.1.4"], ["0.1.5"]), ("<=2", ["2.0.0"], ["2.0.1"])],
)  # fmt: skip
def test_version_ranges(versions: str, inside: list[str], outside: list[str]) -> None:
    assert all(admits(versions, version) for version in inside)
    assert not any(admits(versions, version) for version in outside)


# -- how large text may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, role, size",
    [("licenses/NOTICE.txt", "license", 1 << 20), ("model/more.jinja", "template", 1 << 20),
     ("docs/long.md", "doc", 4 << 20), ("model/big.json", "config", 16 << 20), ("sbom/big.json", "sbom", 16 << 20),
     ("model/tokenizer_config.json", "tokenizer", 16 << 20), ("model/merges.txt", "tokenizer", 64 << 20)],
)  # fmt: skip
def test_text_is_bounded_by_its_role(tmp_path: Path, path: str, role: str, size: int) -> None:
    text = b'{"a": "' + b"x" * (size - 9) + b'"}' if path.endswith(".json") else b"x" * size
    file = tmp_path / "file"
    for more, fits in ((b"", True), (b" ", False)):
        file.write_bytes(text + more)
        digest = hashlib.sha256(text + more).hexdigest()
        chunks = tuple(digest for _ in range(1))
        entry = FileEntry(path=path, size=len(text + more), sha256=digest, role=role, chunk_size=limits.MAX_CHUNK,  # type: ignore[arg-type]
                          chunks=chunks)  # fmt: skip
        with file.open("rb") as opened:
            if fits:
                content.check_file(opened.fileno(), entry)
            else:
                refused(11, "may have", lambda fd=opened.fileno(), entry=entry: content.check_file(fd, entry))


def test_checking_a_vocabulary_takes_no_memory_of_its_size(tmp_path: Path) -> None:
    text = "가나다라".encode() * (48 << 16)  # three bytes each; as Python's text two to four times as much
    file = tmp_path / "tokenizer.json"
    file.write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    entry = FileEntry(path="model/tokenizer.json", size=len(text), sha256=digest, role="tokenizer",
                      chunk_size=limits.MAX_CHUNK, chunks=(digest,))  # fmt: skip
    with file.open("rb") as opened:
        tracemalloc.start()
        content.check_file(opened.fileno(), entry)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20
        for bad in (b"\xff", b"\xea", b"\0"):  # also where a character is cut by the end
            file.write_bytes(text[:-3] + bad + (b"" if bad == b"\xea" else b"xx"))
            refused(11, "text", lambda: content.check_file(opened.fileno(), entry))
