"""What the builder makes, and how it says no."""

import json
import os
from pathlib import Path

from bundle_kit import CHUNK, Made, build, make_model, manifest_of, refused

from offline_bundle import BundleError, verify_bundle
from offline_bundle.model.sbom import PATH as SBOM
from offline_bundle.signing.keys import KeyPair


def test_layout_and_manifest(pristine: Made) -> None:
    manifest = manifest_of(pristine.path)
    assert sorted(p.name for p in pristine.path.iterdir()) == ["bundle.json", "licenses", "model", "model.sig", "sbom"]
    roles = {f.path: f.role for f in manifest.files}
    assert roles == {
        "licenses/Apache-2.0.txt": "license",
        "model/README.md": "doc",
        "model/chat_template.jinja": "template",
        "model/config.json": "config",
        "model/model-00001-of-00002.safetensors": "weights",
        "model/model-00002-of-00002.safetensors": "weights",
        "model/model.safetensors.index.json": "config",
        "model/tokenizer.json": "tokenizer",
        "model/tokenizer_config.json": "tokenizer",
        "sbom/bom.cdx.json": "sbom",
    }
    weights = manifest.file("model/model-00001-of-00002.safetensors")
    assert weights is not None
    assert weights.chunk_size == CHUNK
    assert len(weights.chunks) == 4
    assert manifest.requires.disk_bytes == manifest.total_bytes
    for path in pristine.source.iterdir():
        assert (pristine.path / "model" / path.name).read_bytes() == path.read_bytes()


def test_the_bill_of_materials_names_every_file_and_the_licence(pristine: Made) -> None:
    bom = json.loads((pristine.path / SBOM).read_bytes())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["type"] == "machine-learning-model"
    assert bom["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    hashes = {c["name"]: c["hashes"][0]["content"] for c in bom["components"]}
    assert hashes == {f.path: f.sha256 for f in manifest_of(pristine.path).files if f.path != SBOM}


def test_equal_input_and_time_give_an_equal_manifest(pristine: Made, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one = build(pristine.source, tmp_path / "a", pristine.keys)
    two = build(pristine.source, tmp_path / "b", pristine.keys)
    assert (one / "bundle.json").read_bytes() == (two / "bundle.json").read_bytes()
    assert manifest_of(one).created == "2023-11-14T22:13:20Z"


def test_progress_reaches_the_total(vendor: KeyPair, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = make_model(tmp_path / "m")
    build(model, tmp_path / "out", vendor, progress=lambda *a: seen.append(a))
    total = sum(p.stat().st_size for p in model.iterdir())
    assert seen[0] == ("copy", 0, total)
    assert seen[-1] == ("copy", total, total)


def test_requirements_and_exclusions(vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", kib=1)
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("x")
    (model / "convert.py").write_text("x")
    (model / "original").mkdir()
    (model / "original" / "x.pth").write_text("x")
    path = build(
        model,
        tmp_path / "out",
        vendor,
        exclude=[".git*", "*.py", "original/*"],
        requires={"disk_bytes": 10, "runtime": ">=0.1"},
        acceptance="gated",
    )
    manifest = manifest_of(path)
    assert not [f.path for f in manifest.files if "git" in f.path or "convert" in f.path or "original" in f.path]
    assert manifest.requires.runtime == ">=0.1"
    assert manifest.license.acceptance == "gated"
    verify_bundle(path, [vendor.public_path])


def test_an_existing_bundle_is_not_touched(pristine: Made) -> None:
    before = (pristine.path / "bundle.json").stat().st_mtime_ns
    refused(2, "exists already", lambda: build(pristine.source, pristine.path.parent, pristine.keys))
    assert (pristine.path / "bundle.json").stat().st_mtime_ns == before


def test_bad_arguments_are_found_before_copying(pristine: Made, tmp_path: Path) -> None:
    for change in (
        {"name": "a/b"}, {"name": ""}, {"version": "1"}, {"sequence": 0}, {"sequence": 1 << 60},
        {"license_id": "not a licence"}, {"license_id": "../x"}, {"source_repo": "a\nb"}, {"chunk_size": 1},
        {"acceptance": "maybe"}, {"license_url": "http://x\n"},
    ):  # fmt: skip
        refused(2, "argument", lambda c=change: build(pristine.source, tmp_path / "out", pristine.keys, **c))
    assert not (tmp_path / "out").exists()


def test_missing_inputs(pristine: Made, vendor: KeyPair, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(13, "not a model directory", lambda: build(empty, tmp_path / "o", vendor))
    refused(13, "no bundle", lambda: build(tmp_path / "absent", tmp_path / "o", vendor))
    refused(13, "licence", lambda: build(pristine.source, tmp_path / "o", vendor, license_file=tmp_path / "absent"))
    (tmp_path / "blank").write_text("\n")
    refused(2, "is empty", lambda: build(pristine.source, tmp_path / "o", vendor, license_file=tmp_path / "blank"))


def test_a_download_cache_full_of_links_gets_advice(vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", kib=1)
    (model / "config.json").rename(tmp_path / "blob")
    (model / "config.json").symlink_to(tmp_path / "blob")
    error = refused(11, "symbolic link", lambda: build(model, tmp_path / "o", vendor))
    assert "cp -rL" in error.hint


def test_an_incomplete_download_is_named(vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", kib=1)
    (model / "model-00002-of-00002.safetensors").unlink()
    refused(11, "names model-00002", lambda: build(model, tmp_path / "o", vendor))
    assert os.listdir(tmp_path / "o") == []


def test_a_source_that_grows_underway_is_noticed(vendor: KeyPair, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    shard = model / "model-00001-of-00002.safetensors"

    def grow(*_: object) -> None:
        with shard.open("ab") as f:
            f.write(b"x")

    refused(11, "changed while", lambda: build(model, tmp_path / "o", vendor, progress=grow))
    assert os.listdir(tmp_path / "o") == []


def test_stale_leftovers_of_a_killed_build_are_replaced(pristine: Made, tmp_path: Path) -> None:
    stale = tmp_path / "out" / ".tiny-1.0.0.partial" / "model"
    stale.mkdir(parents=True)
    (stale / "junk.json").write_text("{")
    path = build(pristine.source, tmp_path / "out", pristine.keys)
    verify_bundle(path, pristine.trusted)
    assert os.listdir(tmp_path / "out") == ["tiny-1.0.0"]


def test_errors_tell_what_to_do() -> None:
    error = BundleError("It broke.", "Mend it.", 30)
    assert str(error) == "It broke. Mend it."
