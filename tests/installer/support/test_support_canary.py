"""The support bundle of a real installation with the real engine: canaries planted wherever a secret or a prompt could
be, and none of them may be in the archive. The same planting shows that the archive is not simply empty."""

import http.client
import json
import os
import ssl
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installer_kit import Site, Witness
from ports import free_port

from installer.access import api_keys
from installer.audit import log as audit_log
from installer.base.errors import ExitCode, InstallError
from installer.decide.install_options import InstallOptions
from installer.operate.install import Installer
from installer.operate.lifecycle import stop
from installer.support import archive
from installer.tls import endpoint as tls_endpoint
from offline_bundle.model.build import build_bundle
from offline_bundle.signing.keys import KeyPair


def canary(where: str) -> str:
    """A secret that tells where it was planted, should it turn up."""
    return f"CANARY7f3a-{where}-9d1e"


@pytest.fixture(scope="module")
def real_bundle(
    tiny_llama_dir: Callable[..., Path], signer: KeyPair, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("tiny-real")
    (out / "LICENSE").write_text("For tests.\n")
    return build_bundle(
        tiny_llama_dir("gqa"), out, name="tiny", version="1.0.0", sequence=1, license_id="LicenseRef-Test",
        license_file=out / "LICENSE", source_repo="example/tiny", source_revision="0" * 40,
        private_key=signer.private_path, acceptance="none",
    )


def installed(site: Site, bundle: Path) -> str:
    """The real engine, over TLS; returns the API key."""
    options = InstallOptions(
        bundle, site.prefix, trust_keys=[site.key], port=site.port, start_timeout=60.0, smoke_timeout=60.0,
        confirmed=True,
    )
    result = Installer(options, Witness(), service=site.service).run()
    assert result.api_key is not None
    return result.api_key


@pytest.fixture
def serving(site: Site, real_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, str]:
    """An installation made by somebody whose environment is full of secrets."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DATABASE_URL", "SUDO_USER"):
        monkeypatch.setenv(name, canary(f"env-{name}"))
    return site, installed(site, real_bundle)


@pytest.fixture(scope="module")
def standing(real_bundle: Path, signer: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One installation for the tests that only make archives of it."""
    site = Site(tmp_path_factory.mktemp("standing") / "prefix", free_port(), signer.public_path)
    installed(site, real_bundle)
    yield site
    stop(site.layout, service=site.service)


def request(site: Site, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (http.client.HTTPException, OSError, ssl.SSLError):
        return 0
    finally:
        connection.close()


def misuse(site: Site, key: str) -> None:
    """Requests with a canary in every place that a client fills."""
    good = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def chat(**fields: object) -> bytes:
        content = [{"role": "user", "content": canary("prompt")}]
        return json.dumps({"model": "tiny", "messages": content, "max_tokens": 4, **fields}).encode()

    assert request(site, "POST", "/v1/chat/completions", chat(user=canary("user")), good) == 200
    assert request(site, "POST", "/v1/chat/completions", chat(stream=True), good) == 200
    odd = {**good, "X-Request-Id": canary("request-id"), "User-Agent": canary("agent"), "Cookie": canary("cookie")}
    assert request(site, "POST", "/v1/completions", json.dumps({"prompt": canary("completion")}).encode(), odd) == 200
    assert request(site, "POST", "/v1/chat/completions", chat(model=canary("model")), good) == 404
    assert request(site, "POST", "/v1/chat/completions", chat(temperature=canary("temperature")), good) == 400
    assert request(site, "POST", "/v1/chat/completions", b'{"' + canary("broken").encode(), good) == 400
    assert request(site, "GET", f"/v1/models/{canary('path')}?k={canary('query')}", b"", good) == 404
    assert request(site, "GET", f"/{canary('nowhere')}", b"", good) == 404
    wrong = {"Authorization": f"Bearer sk-{canary('wrong-key')}"}
    assert request(site, "POST", "/v1/chat/completions", chat(), wrong) == 401
    request(site, canary("method")[:12].upper().replace("-", ""), "/", b"", good)


def plant(site: Site) -> None:
    """Canaries in files and logs that people and programs write."""
    layout = site.layout
    text = layout.config.read_text()
    layout.config.write_text(
        f"# {canary('toml-comment')}\n{text}\nhf-token = \"{canary('toml-key')}\"\n"
        f"my-note = \"{canary('toml-note')}\"\n"
        f"[extra]\npassword = \"{canary('toml-table')}\"\n"
    )
    (layout.credentials / "engine-token").write_text(canary("credential"))
    (layout.etc / "notes.txt").write_text(canary("stray-file"))
    tls_endpoint.ensure(layout, ["localhost"])
    api_keys.add(layout.api_keys, canary("key-name"))
    audit_log.append(layout.audit, "check-waived", check="egress", reason=canary("waiver"))
    crash = (
        "Traceback (most recent call last):\n"
        '  File "engine/core/loop.py", line 210, in step\n'
        f"    fail({canary('source')!r})\n"
        f"ValueError: cannot sample {canary('exception')}\n"
    )
    lines = [
        crash,
        f"a library says: {canary('library')}\n",
        json.dumps({"level": "warning", "logger": "transformers", "message": canary("library-json")}) + "\n",
        json.dumps({"level": "error", "logger": "atoll.server", "message": f"request {canary('rid')} failed",
                    "traceback": crash}) + "\n",
        json.dumps({"level": "warning", "logger": "atoll.server",
                    "message": f"stream failed: ValueError: {canary('stream')}"}) + "\n",
        json.dumps({"level": "info", "logger": "atoll.engine", "message": "x", "prompt": canary("field")}) + "\n",
        json.dumps({"level": "info", "logger": "atoll.gateway", "message": f"key sk-{canary('sk')}"}) + "\n",
        json.dumps({"level": "info", "logger": "atoll.gateway", "message": f"api_key={canary('named')}"}) + "\n",
        json.dumps({"level": "info", "logger": "atoll.access", "message": f"GET /{canary('access')}"}) + "\n",
        '{"level": "info", "message": "' + canary("half a line") + "\n",
    ]
    with layout.log.open("a") as log:
        log.writelines(lines)


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        found = {}
        for member in tar.getmembers():
            assert member.isfile()
            assert not member.name.startswith(("/", ".."))
            assert (member.mode, member.uid, member.gid) == (0o600, 0, 0)
            file = tar.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


def test_no_canary_leaves_the_machine(serving: tuple[Site, str], tmp_path: Path) -> None:
    site, key = serving
    misuse(site, key)
    plant(site)
    out = tmp_path / "support.tar.gz"
    command = [sys.executable, "-m", "appliance.cli", "support-bundle", "--prefix", str(site.prefix), "--out", str(out)]
    environment = {**os.environ, "ATOLL_PASSWORD": canary("own-env")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    members = unpacked(out)
    everything = "\n".join([*members.values(), *members, done.stdout, done.stderr])

    assert "CANARY" not in everything
    assert key not in everything
    assert "PRIVATE KEY" not in everything
    for secret in (site.layout.server_key, site.layout.ca_key):
        for line in secret.read_text().splitlines():
            if len(line) > 30 and not line.startswith("-") and line not in site.layout.server_cert.read_text():
                assert line not in everything or line in site.layout.ca_cert.read_text()
    for entry in api_keys.read(site.layout.api_keys):
        assert entry["sha256"] not in everything

    # It would have been easy to be silent: the planted places were read, and what helps is there.
    assert canary("library") in site.layout.log.read_text()
    log = members["log.txt"]
    assert "Memory plan" in log
    assert '"logger": "atoll.access"' in log
    assert "POST /v1/chat/completions" in log
    assert "<another path>" in log
    assert 'File "engine/core/loop.py", line 210, in step' in log
    assert "ValueError: <not shown>" in log
    assert "request failed" in log
    settings = json.loads(members["settings.json"])
    assert settings["serve"]["port"] == site.port
    assert settings["serve"]["my-note"] == settings["extra"]["password"] == "<not shown>"
    assert json.loads(members["status.json"])["state"] == "serving"
    assert "Memory plan" in members["memory-plan.txt"]
    assert "etc/atoll/credentials/engine-token" in members["files.txt"]
    assert '"event": "check-waived"' in members["audit.jsonl"]
    assert '"event": "commit"' in members["install-journal.jsonl"]


def test_the_manifest_says_what_was_taken_and_why(standing: Site, tmp_path: Path) -> None:
    made = archive.make(standing.layout, tmp_path / "s.tar.gz")
    members = unpacked(made.path)
    manifest = json.loads(members.pop("MANIFEST.json"))
    listed = {entry["name"]: entry for entry in manifest["members"]}
    assert members.keys() == {name for name, entry in listed.items() if not entry["not_taken"]}
    for name, text in members.items():
        assert listed[name]["bytes"] == len(text.encode())
        assert listed[name]["why"]
    assert "there is none" in listed["verify.json"]["not_taken"]
    with pytest.raises(InstallError, match="already exists") as caught:
        archive.make(standing.layout, made.path)
    assert caught.value.exit_code == ExitCode.USAGE


def test_addresses_go_on_request_only(standing: Site, tmp_path: Path) -> None:
    line = {"level": "info", "logger": "atoll.access", "message": "GET /v1/models", "status": 200}
    with standing.layout.log.open("a") as log:
        for client in ("192.0.2.77", "2001:db8::7", "192.0.2.77", "127.0.0.1"):
            log.write(json.dumps({**line, "client": client}) + "\n")
    plain = unpacked(archive.make(standing.layout, tmp_path / "a.tar.gz").path)["log.txt"]
    assert "192.0.2.77" in plain
    assert "2001:db8::7" in plain
    hidden = unpacked(archive.make(standing.layout, tmp_path / "b.tar.gz", redact_addresses=True).path)["log.txt"]
    assert "192.0.2.77" not in hidden
    assert "2001:db8::7" not in hidden
    assert "127.0.0.1" in hidden
    stand_ins = [json.loads(text)["client"] for text in hidden.splitlines() if '"client": "<' in text]
    assert len(stand_ins) >= 3
    assert stand_ins[-3] == stand_ins[-1] != stand_ins[-2]


def test_a_part_that_holds_a_secret_after_all_is_left_out(standing: Site, tmp_path: Path) -> None:
    """The last look, with a part that lies about its content: it drops the part, not the bundle."""
    from installer.support.items import Item, private_parts

    tls_endpoint.ensure(standing.layout, ["localhost"])
    secret = private_parts(standing.layout)[0].decode()
    bad = [Item("leak.txt", "a mistake", lambda: f"x {secret} x"), Item("broken.txt", "a mistake", lambda: 1 / 0)]  # type: ignore[arg-type,return-value]
    made = archive.make(standing.layout, tmp_path / "s.tar.gz", extra=bad)
    notes = {taken.name: taken.not_taken for taken in made.members}
    assert "private keys" in notes["leak.txt"]
    assert notes["broken.txt"] == "it failed: ZeroDivisionError"
    assert "leak.txt" not in unpacked(made.path)


def test_parts_are_cut_to_their_size(standing: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from installer.support.items import Item

    monkeypatch.setattr(archive, "ITEM_BYTES", 10_000)
    monkeypatch.setattr(archive, "TOTAL_BYTES", 60_000)
    extra = [Item(f"big{n}.txt", "size", lambda: "line\n" * 10_000) for n in range(9)]
    made = archive.make(standing.layout, tmp_path / "s.tar.gz", extra=extra)
    assert sum(taken.bytes for taken in made.members) <= 60_000
    assert all(taken.bytes <= 10_000 for taken in made.members)
    assert any(taken.cut for taken in made.members)
    assert "MiB" in made.members[-1].not_taken or made.members[-1].not_taken
