"""The file of API keys: shown once, hashed, revocable; two readers (installer and gateway) that no garbage can fool."""

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.server.access.auth import KeyFile
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError

PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "credentials").mkdir(mode=0o700)
    return tmp_path / "credentials/api-keys.json"


def test_a_key_opens_the_gateway_and_its_text_is_nowhere(path: Path) -> None:
    key = api_keys.add(path, "team a")
    assert len(key.text) == 3 + 43  # 256 bits, base64
    found = KeyFile(path).check(key.text)
    assert found is not None
    assert (found.id, found.name, sorted(found.scopes)) == (key.id, "team a", ["metrics", "serve"])
    for file in path.parent.iterdir():
        assert key.text.encode() not in file.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_revoked_key_is_refused_at_once_and_stays_listed(path: Path) -> None:
    one, two = api_keys.add(path, "one"), api_keys.add(path, "two")
    gateway = KeyFile(path)
    assert gateway.check(one.text)
    revoked = api_keys.revoke(path, one.id[:5])
    assert revoked["id"] == one.id
    assert gateway.check(one.text) is None
    assert gateway.check(two.text)
    assert [api_keys.state(entry) for entry in api_keys.people(path)] == ["revoked", "active"]
    assert [entry["id"] for entry in api_keys.usable(path)] == [two.id]
    api_keys.revoke(path, "one")  # again: no error, no change
    assert api_keys.people(path)[0]["revoked_at"] == revoked["revoked_at"]


def test_an_expired_key_is_refused(path: Path) -> None:
    short, long = api_keys.add(path, "short", lifetime=1), api_keys.add(path, "long", lifetime=90 * 86400)
    gateway = KeyFile(path)
    assert gateway.check(long.text)
    time.sleep(1.2)
    assert gateway.check(short.text) is None
    assert gateway.check(long.text)
    assert [api_keys.state(entry) for entry in api_keys.people(path)] == ["expired", "active"]
    left = api_keys.seconds_left(api_keys.people(path)[1])
    assert left is not None
    assert 89 < left / 86400 < 91


@pytest.mark.parametrize("scopes, serve, metrics", [
    (("serve",), True, False), (("metrics",), False, True), (("serve", "metrics"), True, True),
    (("admin",), True, True), (("priority",), False, False), (("serve", "priority"), True, False),
])
def test_scopes(path: Path, scopes: tuple[str, ...], serve: bool, metrics: bool) -> None:
    text = api_keys.add(path, "k", scopes=scopes).text
    key = KeyFile(path).check(text)
    assert key is not None
    assert key.allows("serve") is serve
    assert key.allows("metrics") is metrics
    assert key.allows("priority") is bool({"priority", "admin"} & set(scopes))


def test_only_keys_of_one_group_are_one_tenant(path: Path) -> None:
    made = {name: api_keys.add(path, name, group=group) for name, group in (
        ("one", "search"), ("two", "search"), ("three", "other"), ("four", ""), ("five", ""))}
    tenants = {name: KeyFile(path).check(key.text).tenant for name, key in made.items()}  # type: ignore[union-attr]
    assert tenants["one"] == tenants["two"]
    assert len(set(tenants.values())) == 4
    assert [entry.get("group") for entry in api_keys.people(path)] == ["search", "search", "other", None, None]


def test_a_group_cannot_pass_for_a_key(path: Path) -> None:
    key = api_keys.add(path, "one")
    lone = KeyFile(path).check(key.text)
    assert lone is not None
    posing = api_keys.add(path, "two", group=lone.tenant[:64])
    found = KeyFile(path).check(posing.text)
    assert found is not None
    assert found.tenant != lone.tenant


def test_keys_older_than_groups_share_with_nobody_and_a_group_of_another_kind_is_refused(path: Path) -> None:
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in ("sk-old-1", "sk-old-2")]
    path.write_text(json.dumps({"keys": [{"id": "same", "sha256": digest} for digest in digests]}))
    assert len(api_keys.people(path)) == 2
    gateway = KeyFile(path)
    tenants = {gateway.check(text).tenant for text in ("sk-old-1", "sk-old-2")}  # type: ignore[union-attr]
    assert len(tenants) == 2
    for group in (3, ["x"], "a\nb", "x" * 65):
        path.write_text(json.dumps({"keys": [{"id": "odd", "sha256": digests[0], "group": group}]}))
        with pytest.raises(InstallError, match="group"):
            api_keys.read(path)
        with pytest.raises(ConfigError, match="group"):
            KeyFile(path)


@pytest.mark.parametrize("group", ["  ", "a\nb", "x" * 65, "\x1b[31m"])
def test_a_groups_name_fits_on_one_line(path: Path, group: str) -> None:
    with pytest.raises(InstallError, match="group"):
        api_keys.add(path, "k", group=group)
    assert not path.exists()


def test_keys_older_than_scopes_do_what_they_did_and_unknown_scopes_open_nothing(path: Path) -> None:
    digest = hashlib.sha256(b"sk-old").hexdigest()
    path.write_text(json.dumps({"keys": [{"id": "old", "sha256": digest}]}))
    found = KeyFile(path).check("sk-old")
    assert found is not None
    assert found.allows("serve")
    assert found.allows("metrics")
    path.write_text(json.dumps({"keys": [{"id": "odd", "sha256": digest, "scopes": ["future"]}]}))
    odd = KeyFile(path).check("sk-old")
    assert odd is not None
    assert not odd.allows("serve")
    assert not odd.allows("admin")


@pytest.mark.parametrize("reference", ["nobody", "", "one", api_keys._SMOKE])
def test_what_does_not_name_one_key_revokes_none(path: Path, reference: str) -> None:
    api_keys.add(path, "one")
    api_keys.add(path, "one")
    api_keys.add_smoke(path, 60)
    before = path.read_bytes()
    with pytest.raises(InstallError) as caught:
        api_keys.revoke(path, reference)
    assert caught.value.exit_code == ExitCode.USAGE
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 65, "\x1b[31m"])
def test_names_fit_on_one_line(path: Path, name: str) -> None:
    with pytest.raises(InstallError):
        api_keys.add(path, name)
    assert not path.exists()


@pytest.mark.parametrize("scopes", [(), ("root",), ("serve", "")])
def test_unknown_scopes_are_refused(path: Path, scopes: tuple[str, ...]) -> None:
    with pytest.raises(InstallError, match="scope"):
        api_keys.add(path, "k", scopes=scopes)


def test_the_smoke_tests_key_is_nobodys_and_leaves(path: Path) -> None:
    smoke = api_keys.add_smoke(path, 60)
    assert KeyFile(path).check(smoke.text)
    assert api_keys.people(path) == api_keys.usable(path) == []
    api_keys.remove(path, set(), smoke=True)
    assert not path.exists()


def test_two_at_once_lose_nothing(path: Path) -> None:
    made: list[str] = []
    workers = [threading.Thread(target=lambda n=n: made.append(api_keys.add(path, f"key {n}").id)) for n in range(12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert {entry["id"] for entry in api_keys.read(path)} == set(made)
    assert len(made) == 12


# What an attacker, a broken disk or a hand with an editor may leave in the file.
DIGEST = hashlib.sha256(b"sk-known").hexdigest()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
FIELD = st.sampled_from(["id", "name", "sha256", "created", "expires", "revoked", "scopes", "group", "other"])
ENTRY = st.dictionaries(FIELD, JSON | st.just(DIGEST) | st.just([DIGEST]) | st.just(int("7" * 64)), max_size=8)
FILE = st.binary(max_size=200) | st.builds(
    lambda value: json.dumps(value).encode(), JSON | st.fixed_dictionaries({"keys": JSON | st.lists(ENTRY, max_size=4)})
)


def admitted(path: Path, presented: str) -> bool:
    """Whether the gateway takes it; a file that it refuses at the start admits nobody."""
    try:
        return KeyFile(path).check(presented) is not None
    except ConfigError:
        return False


@PROPERTY
@given(content=FILE, presented=st.text(max_size=30))
def test_garbage_is_never_a_key_and_never_a_crash(path: Path, content: bytes, presented: str) -> None:
    path.write_bytes(content)
    assert not admitted(path, presented)
    if admitted(path, "sk-known"):  # only where an entry holds its very digest, as a text
        entries = json.loads(content)["keys"]
        assert any(isinstance(entry["sha256"], str) and entry["sha256"].lower() == DIGEST for entry in entries)
    with contextlib.suppress(InstallError):
        api_keys.read(path)
    assert path.read_bytes() == content


@PROPERTY
@given(cut=st.integers(0, 400), flip=st.integers(0, 7), at=st.integers(0, 400))
def test_a_torn_or_flipped_file_admits_no_key_but_the_real_one(path: Path, cut: int, flip: int, at: int) -> None:
    path.unlink(missing_ok=True)
    key = api_keys.add(path, "real")
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << flip
    path.write_bytes(bytes(data[: max(cut, 1)]) if cut < 200 else bytes(data))
    for wrong in ("sk-", key.text[:-1], key.text + "x", "sk-" + "A" * 43, key.id):
        assert not admitted(path, wrong)


@PROPERTY
@given(presented=st.text() | st.characters(categories=["Cs"]).map(lambda c: f"sk-{c}"))
def test_whatever_is_presented_is_only_refused(path: Path, presented: str) -> None:
    if not path.exists():
        api_keys.add(path, "real")
    assert KeyFile(path).check(presented) is None


@pytest.mark.parametrize("content", [
    "[" * 50000, '"sha256": DIGEST, "expires": 1' + "0" * 400, '"sha256": DIGEST, "expires": NaN',
    '"sha256": DIGEST, "expires": Infinity', '"sha256": ' + "7" * 64, '"sha256": DIGEST, "scopes": "serve"',
])
def test_hostile_content_is_an_error_not_a_crash(path: Path, content: str) -> None:
    path.write_text('{"keys": [{"id": "a", ' + content.replace("DIGEST", f'"{DIGEST}"') + "}]}")
    with pytest.raises(ConfigError):
        KeyFile(path)
    with pytest.raises(InstallError):
        api_keys.read(path)


def test_special_files_are_refused_without_waiting(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="regular"):
        KeyFile(path)
    with pytest.raises(InstallError):
        api_keys.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError):
        KeyFile(path)


def test_a_file_that_became_readable_is_read(path: Path) -> None:
    """A change of mode or owner is a change: the gateway must not go on without the keys that it now may read."""
    one = api_keys.add(path, "one")
    gateway = KeyFile(path)
    good = path.read_bytes()
    two = api_keys.add(path, "two")
    both, info = path.read_bytes(), path.stat()
    path.write_bytes(b"x" * len(good))
    assert gateway.check(one.text)
    path.write_bytes(both)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert gateway.check(two.text)
