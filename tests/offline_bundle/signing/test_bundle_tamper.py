"""The tamper matrix: our verifier and the independent `model_signing` command must agree wherever it looks at all."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_kit import Made, oms_accepts, refused

from offline_bundle import untrusted_dir, verify_bundle
from offline_bundle.bundle.verify import check_signed_manifest
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private, load_trusted
from offline_bundle.store.ingest import ingest

SHARD = "model/model-00001-of-00002.safetensors"
OTHER = "model/model-00002-of-00002.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def swap(b: Path) -> None:
    (b / SHARD).rename(b / "t")
    (b / OTHER).rename(b / SHARD)
    (b / "t").rename(b / OTHER)


def to_symlink(b: Path) -> None:
    (b / SHARD).rename(b.parent / "elsewhere")
    (b / SHARD).symlink_to(b.parent / "elsewhere")  # same content, so only the kind of file differs


def directory_to_symlink(b: Path) -> None:
    (b / "licenses").rename(b.parent / "licenses")
    (b / "licenses").symlink_to(b.parent / "licenses")


def to_fifo(b: Path) -> None:
    (b / "model/config.json").unlink()
    os.mkfifo(b / "model/config.json")


def edit_signature(b: Path, change: Callable[[dict], None]) -> None:
    envelope = json.loads((b / "model.sig").read_bytes())
    change(envelope)
    (b / "model.sig").write_text(json.dumps(envelope))


def flip_base64(text: str, at: int) -> str:
    return text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]


def spoil_payload(e: dict) -> None:
    e["dsseEnvelope"]["payload"] = flip_base64(e["dsseEnvelope"]["payload"], 200)


def spoil_raw_signature(e: dict) -> None:
    e["dsseEnvelope"]["signatures"][0]["sig"] = flip_base64(e["dsseEnvelope"]["signatures"][0]["sig"], 30)


# name → (what the attacker does, exit code, words in the message)
BOTH_REFUSE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "first byte of a chunk": (lambda b: flip(b / SHARD, 2 * 65536), 11, "bytes 131072-"),
    "last byte of weights": (lambda b: flip(b / SHARD, -1), 11, SHARD),
    "byte of config": (lambda b: flip(b / "model/config.json", 5), 11, "config.json"),
    "byte of bundle.json": (lambda b: flip(b / "bundle.json", 20), 11, "bundle.json"),
    "byte of licence": (lambda b: flip(b / "licenses/Apache-2.0.txt", 0), 11, "licenses"),
    "truncated": (lambda b: os.truncate(b / SHARD, 1000), 11, "cut off"),
    "emptied": (lambda b: os.truncate(b / SHARD, 0), 11, "cut off"),
    "longer": (lambda b: (b / SHARD).write_bytes((b / SHARD).read_bytes() + b"\0"), 11, SHARD),
    "extra file": (lambda b: (b / "model/extra.json").write_text("{}"), 11, "not part"),
    "extra empty file": (lambda b: (b / "EXTRA").touch(), 11, "not part"),
    "missing shard": (lambda b: (b / SHARD).unlink(), 13, SHARD),
    "missing bundle.json": (lambda b: (b / "bundle.json").unlink(), 13, "bundle.json"),
    "swapped shards": (swap, 11, "differs"),
    "renamed file": (lambda b: (b / SHARD).rename(b / "model/x.safetensors"), 11, "not part"),
    "file is a symlink": (to_symlink, 11, "link"),
    "directory is a symlink": (directory_to_symlink, 11, "link"),
    "dangling symlink": (lambda b: (b / "model/x.json").symlink_to("/nonexistent"), 11, "link"),
    "file is a FIFO": (to_fifo, 11, "FIFO"),
    "signed payload changed": (lambda b: edit_signature(b, spoil_payload), 10, "signature"),
    "raw signature changed": (lambda b: edit_signature(b, spoil_raw_signature), 10, "signature"),
    "no signature": (lambda b: (b / "model.sig").unlink(), 10, "no usable signature"),
    "empty signature": (lambda b: (b / "model.sig").write_bytes(b""), 10, "model.sig"),
    "other media type": (lambda b: edit_signature(b, lambda e: e.update(mediaType="x")), 10, "media type"),
}

# What the format leaves uncovered, and we do not.
ONLY_WE_REFUSE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    ".git directory": (lambda b: shutil.copytree(b / "model", b / ".git"), 11, "git"),
    ".gitignore": (lambda b: (b / ".gitignore").write_text("x"), 11, "git"),
    ".gitattributes": (lambda b: (b / ".gitattributes").write_text("x"), 11, "git"),
    "extra empty directory": (lambda b: (b / "model/empty").mkdir(), 11, "not part"),
}


@pytest.mark.parametrize("case", BOTH_REFUSE)
def test_both_refuse(case: str, made: Made, tmp_path: Path) -> None:
    spoil, code, words = BOTH_REFUSE[case]
    spoil(made.path)
    refused(code, words, lambda: verify_bundle(made.path, made.trusted))
    refused(code, words, lambda: verify_bundle(made.path, made.trusted, full=True))
    refused(code, words, lambda: ingest(made.path, made.trusted, tmp_path / "store"))
    assert [p for p in (tmp_path / "store").glob("*") if not p.name.startswith(".")] == []
    assert not oms_accepts(made.path, made.keys.public_path)


@pytest.mark.parametrize("case", ONLY_WE_REFUSE)
def test_only_we_refuse(case: str, made: Made, tmp_path: Path) -> None:
    spoil, code, words = ONLY_WE_REFUSE[case]
    spoil(made.path)
    refused(code, words, lambda: verify_bundle(made.path, made.trusted))
    refused(code, words, lambda: ingest(made.path, made.trusted, tmp_path / "store"))
    assert oms_accepts(made.path, made.keys.public_path)


def test_both_accept_the_untouched_bundle(pristine: Made) -> None:
    found = verify_bundle(pristine.path, pristine.trusted, full=True)
    assert found.key_fingerprint == pristine.keys.fingerprint
    assert oms_accepts(pristine.path, pristine.keys.public_path)


def test_both_refuse_a_key_that_is_not_the_signers(pristine: Made, stranger: KeyPair) -> None:
    error = refused(10, "not trusted", lambda: verify_bundle(pristine.path, [stranger.public_path]))
    assert pristine.keys.fingerprint in error.message
    assert stranger.fingerprint in error.hint
    assert not oms_accepts(pristine.path, stranger.public_path)


def test_both_refuse_a_stranger_who_claims_the_vendors_hint(made: Made, stranger: KeyPair) -> None:
    signed = {
        str(p.relative_to(made.path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in made.path.rglob("*")
        if p.is_file() and p.name != "model.sig"
    }
    (made.path / "model.sig").write_bytes(model_signing.sign(signed, "tiny", load_private(stranger.private_path)))
    edit_signature(made.path, lambda e: e["verificationMaterial"]["publicKey"].update(hint=made.keys.fingerprint))
    refused(10, "not valid", lambda: verify_bundle(made.path, made.trusted))
    assert not oms_accepts(made.path, made.keys.public_path)


@pytest.mark.parametrize("part", [SHARD, "model"])
def test_a_link_put_in_place_after_the_walk_is_not_followed(part: str, made: Made, tmp_path: Path) -> None:
    """Same content behind the link, so only the way of opening can tell."""

    def race(*_: object) -> None:
        if not (made.path / part).is_symlink():
            (made.path / part).rename(tmp_path / "elsewhere")
            (made.path / part).symlink_to(tmp_path / "elsewhere")

    refused(11, "link", lambda: ingest(made.path, made.trusted, tmp_path / "store", progress=race))
    (made.path / part).unlink()
    (tmp_path / "elsewhere").rename(made.path / part)
    refused(11, "link", lambda: verify_bundle(made.path, made.trusted, progress=race))


def test_hard_links_are_ordinary_files(made: Made, tmp_path: Path) -> None:
    os.link(made.path / SHARD, tmp_path / "second-name")
    verify_bundle(made.path, made.trusted)
    assert oms_accepts(made.path, made.keys.public_path)


def test_any_of_several_trusted_keys_may_have_signed(pristine: Made, stranger: KeyPair) -> None:
    found = verify_bundle(pristine.path, [stranger.public_path, pristine.keys.public_path])
    assert found.key_fingerprint == pristine.keys.fingerprint


def test_a_key_inside_the_bundle_is_never_trusted(made: Made) -> None:
    inside = made.path / "vendor.pub"
    shutil.copy(made.keys.public_path, inside)
    refused(10, "inside the bundle", lambda: verify_bundle(made.path, [inside]))
    link = made.path.parent / "looks-outside.pub"
    link.symlink_to(inside)
    refused(10, "inside the bundle", lambda: verify_bundle(made.path, [link]))


def test_no_key_no_trust(pristine: Made) -> None:
    refused(2, "no trusted key", lambda: verify_bundle(pristine.path, []))


def test_absent_and_wrong_paths(pristine: Made, tmp_path: Path) -> None:
    refused(13, "no bundle", lambda: verify_bundle(tmp_path / "nothing", pristine.trusted))
    refused(13, "not a directory", lambda: verify_bundle(pristine.path / "bundle.json", pristine.trusted))


def test_desktop_litter_is_named_as_such(made: Made) -> None:
    (made.path / "model/.DS_Store").write_text("x")
    error = refused(11, ".DS_Store", lambda: verify_bundle(made.path, made.trusted))
    assert "desktop" in error.hint


def test_control_characters_in_a_file_name_do_not_reach_the_terminal(made: Made) -> None:
    (made.path / "model/\x1b[2Jx.json").write_text("{}")
    error = refused(11, "characters outside", lambda: verify_bundle(made.path, made.trusted))
    assert "\x1b" not in str(error)


def test_a_name_that_is_not_unicode_is_refused_readably(made: Made) -> None:
    (made.path / os.fsdecode(b"model/\xff\xfe.json")).write_text("{}")
    error = refused(11, "characters outside", lambda: verify_bundle(made.path, made.trusted))
    assert error.message.isascii()


def test_a_read_error_is_not_called_a_bad_signature(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    trusted = load_trusted(made.trusted, made.path)
    monkeypatch.setattr(os, "read", fail)
    with untrusted_dir.open_root(made.path) as root:
        refused(30, "Input/output error", lambda: check_signed_manifest(root, trusted, None))
