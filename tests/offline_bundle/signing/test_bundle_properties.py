"""Properties over generated names, manifests and damaged bytes."""

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pytest
from bundle_kit import Made
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from offline_bundle import BundleError, BundleManifest, names, verify_bundle
from offline_bundle.model import safetensors_header
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import load_public
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads

T = TypeVar("T")


def outcome(call: Callable[[], T]) -> tuple[T | None, BundleError]:
    """(result, an unused error) or (None, the refusal)."""
    try:
        return call(), BundleError("")
    except BundleError as e:
        return None, e


quick = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_AWKWARD = "aAbZ09._-/\\é\u0301\u212a \0\n"
paths = st.one_of(
    st.text(max_size=40),
    st.lists(st.text(alphabet="aAbZ09._-/\\é\u0301\u212a \0\n", min_size=1, max_size=6), min_size=1, max_size=5).map(
        "/".join
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@quick
@given(paths)
@example("a/../b")
@example("K.json")  # KELVIN SIGN: equals 'K' after normalisation and case folding
def test_an_allowed_path_is_harmless_everywhere(path: str) -> None:
    if names.path_problem(path) is not None:
        with pytest.raises(BundleError) as caught:
            names.check_path(path)
        assert caught.value.message.isprintable()
        return
    assert path.isascii()
    assert path.isprintable()
    assert str(PurePosixPath(path)) == path
    assert not PurePosixPath(path).is_absolute()
    assert os.path.normpath(os.path.join("/store/x", path)) == f"/store/x/{path}"
    assert unicodedata.normalize("NFKC", path) == path
    assert not any(step.startswith((".", "-")) for step in path.split("/"))


@quick
@given(st.lists(st.text(alphabet="aAbB/", min_size=1, max_size=5), max_size=6))
def test_paths_without_collision_stay_apart_when_case_is_ignored(candidates: list[str]) -> None:
    allowed = [p for p in candidates if names.path_problem(p) is None]
    found = names.collision(allowed)
    files = [p.lower() for p in allowed]
    prefixes = {p[:i] for p in allowed for i, c in enumerate(p) if c == "/"}
    apart = (
        len(set(files)) == len(files)
        and not set(files) & {p.lower() for p in prefixes}
        and len({p.lower() for p in prefixes}) == len(prefixes)
    )
    assert (found is None) == apart


@quick
@given(json_values)
def test_canonical_json_is_a_fixed_point(value: Any) -> None:
    text = canonical(value)
    assert loads(text) == value
    assert canonical(loads(text)) == text


@quick
@given(st.binary(max_size=200))
@example(b'{"a":1,"a":1}')
@example(b"9" * 5000)
@example(b"[" * 100_000)
@example(b'"\\ud800"')
def test_any_bytes_give_a_value_or_one_kind_of_error(data: bytes) -> None:
    try:
        canonical(loads(data))
    except StrictJSONError:
        pass
    with pytest.raises(BundleError):
        BundleManifest.parse(data)
    with pytest.raises(BundleError):
        model_signing.verify(data, {})


@quick
@given(data=st.data())
def test_one_changed_value_in_the_manifest_is_refused_or_honest(data: st.DataObject, pristine: Made) -> None:
    """Replace one value anywhere by another: `parse` refuses, or returns exactly what the text says."""
    manifest = json.loads((pristine.path / "bundle.json").read_bytes())
    node, key = manifest, data.draw(st.sampled_from(sorted(manifest)))
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    new = data.draw(json_values)
    assume(type(new) is not type(node[key]) or new != node[key])
    node[key] = new
    text = canonical(manifest)
    parsed, error = outcome(lambda: BundleManifest.parse(text))
    if parsed is not None:
        assert parsed.to_bytes() == text
    else:
        assert error.exit_code == 11
        assert error.message.isprintable()


@settings(parent=quick, max_examples=60)
@given(name=st.sampled_from(["bundle.json", "model.sig"]), at=st.integers(0, 1 << 30), byte=st.integers(0, 255))
def test_a_changed_byte_never_changes_what_is_accepted(name: str, at: int, byte: int, pristine: Made) -> None:
    original = (pristine.path / name).read_bytes()
    at %= len(original)
    assume(original[at] != byte)
    changed = original[:at] + bytes([byte]) + original[at + 1 :]
    if name == "bundle.json":
        with pytest.raises(BundleError):
            if BundleManifest.parse(changed).to_bytes() != original:
                raise BundleError("another manifest, and so another hash")
        return
    key = load_public(pristine.keys.public_path)
    expected, _ = model_signing.verify(original, {key.fingerprint: key})
    found, error = outcome(lambda: model_signing.verify(changed, {key.fingerprint: key})[0])
    if found is not None:  # outside of what is signed, such as an unused field of the envelope
        assert found == expected
    else:
        assert error.exit_code == 10


@settings(parent=quick, max_examples=40)
@given(at=st.integers(0, 1 << 30), bit=st.integers(0, 7), cut=st.booleans())
def test_any_flipped_bit_or_cut_in_the_weights_is_found(
    at: int, bit: int, cut: bool, pristine: Made, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = pristine.copy_to(tmp_path_factory.mktemp("flip"))
    files = sorted(p for p in made.path.rglob("*") if p.is_file() and p.name != "model.sig")
    target = files[at % len(files)]
    data = bytearray(target.read_bytes())
    if cut:
        del data[at % len(data) :]
    else:
        data[at % len(data)] ^= 1 << bit
    target.write_bytes(data)
    with pytest.raises(BundleError) as caught:
        verify_bundle(made.path, made.trusted)
    assert caught.value.exit_code == 11


@quick
@given(data=st.binary(max_size=120), framed=st.booleans())
def test_any_header_gives_a_verdict_and_agrees_with_the_library(
    data: bytes, framed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _same_verdict(len(data).to_bytes(8, "little") + data if framed else data, tmp_path_factory.getbasetemp())


tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "BOOL", "NOPE"]),
        "shape": st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2),
    }
)


@settings(parent=quick, max_examples=400)
@given(header=st.dictionaries(st.sampled_from("abc"), tensors, max_size=3), size=st.integers(0, 40))
def test_generated_headers_agree_with_the_library(header: dict[str, Any], size: int, tmp_path_factory: Any) -> None:
    text = json.dumps(header).encode()
    _same_verdict(len(text).to_bytes(8, "little") + text + bytes(size), tmp_path_factory.getbasetemp())


def _same_verdict(content: bytes, directory: Path) -> None:
    """What we accept the library must be able to load: we may be stricter, never laxer."""
    from safetensors import SafetensorError, safe_open

    path = directory / "generated.safetensors"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        ours = safetensors_header.problem(fd)
    finally:
        os.close(fd)
    try:
        with safe_open(path, framework="np") as f:
            theirs = list(f.keys())
    except (SafetensorError, OSError, ValueError):
        theirs = None
    if ours is None:
        assert theirs is not None
