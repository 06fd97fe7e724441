"""The real engine behind TLS with real keys, used as a client on the network would: the `openai` package."""

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from installer_kit import Site, Witness
from ports import free_port
from tls_kit import Issuer, pem

from installer.decide.install_options import InstallOptions, TlsChoice
from installer.operate.install import Installer
from installer.operate.lifecycle import restart, start, stop
from installer.operate.status import status
from installer.tls import endpoint as tls_endpoint
from offline_bundle.model.build import build_bundle
from offline_bundle.signing.keys import KeyPair


@pytest.fixture(scope="module")
def tiny_bundle(tiny_llama_dir: Callable[..., Path], signer: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny-tls")
    (out / "LICENSE").write_text("For tests.\n")
    return build_bundle(
        tiny_llama_dir("gqa"), out, name="tiny", version="1.0.0", sequence=1, license_id="LicenseRef-Test",
        license_file=out / "LICENSE", source_repo="example/tiny", source_revision="0" * 40,
        private_key=signer.private_path, acceptance="none",
    )


class Endpoint:
    """An installation over TLS, and the commands and clients for it."""

    def __init__(self, site: Site, bundle: Path) -> None:
        self.site = site
        options = InstallOptions(
            bundle, site.prefix, trust_keys=[site.key], port=site.port, start_timeout=60.0, smoke_timeout=60.0,
            confirmed=True, tls=TlsChoice(wanted=True),
        )
        result = Installer(options, Witness(), service=site.service).run()
        assert result.api_key is not None
        self.key, self.url = result.api_key, result.url

    def atoll(self, *arguments: object, code: int = 0) -> str:
        command = [sys.executable, "-m", "appliance.cli", *map(str, arguments), "--prefix", str(self.site.prefix)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done.stdout

    def json(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self.atoll(*arguments, "--json", code=code))

    def client(self, key: str, trusted: Path | None = None) -> openai.OpenAI:
        context = ssl.create_default_context(cafile=trusted or tls_endpoint.ca_file(self.site.layout))
        http = httpx.Client(verify=context)
        return openai.OpenAI(base_url=self.url, api_key=key, http_client=http, max_retries=0)

    def chats(self, key: str, trusted: Path | None = None) -> bool:
        messages: Any = [{"role": "user", "content": "hello"}]
        client = self.client(key, trusted)
        return bool(client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices)

    def cached(self, key: str, prompt: str) -> int:
        """Tokens of the prompt that this key found in the prefix cache."""
        usage = self.client(key).completions.create(model="tiny", prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module")
def endpoint(tiny_bundle: Path, signer: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One for all tests whose changes do not concern the others."""
    site = Site(tmp_path_factory.mktemp("endpoint") / "prefix", free_port(), signer.public_path)
    yield Endpoint(site, tiny_bundle)
    stop(site.layout, service=site.service)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_a_client_that_trusts_the_exported_authority_is_served_and_others_are_not(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    assert endpoint.url.startswith("https://127.0.0.1:")
    exported = tmp_path / "ca.crt"
    shown = endpoint.json("tls", "export-ca", "--out", exported)
    assert endpoint.chats(endpoint.key, exported)
    assert shown["sha256"] == endpoint.json("tls", "show")["ca"]["sha256"]
    stranger = tmp_path / "stranger.crt"
    stranger.write_bytes(pem(Issuer("Somebody").certificate))
    with pytest.raises(openai.APIConnectionError):
        endpoint.chats(endpoint.key, stranger)
    with pytest.raises(httpx.TransportError):  # plain HTTP gets no answer from a TLS port
        httpx.get(f"http://127.0.0.1:{endpoint.site.port}/health")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("DEFAULT:@SECLEVEL=0")  # so that it is the server who refuses
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", endpoint.site.port)) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)


def test_keys_are_made_scoped_and_revoked_while_it_serves(endpoint: Endpoint) -> None:
    pid = endpoint.site.service.state().pid
    team = endpoint.json("apikey", "new", "--name", "team a")
    assert endpoint.chats(team["key"])
    figures = endpoint.json("apikey", "new", "--name", "grafana", "--scope", "metrics", "--expires", "90d")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        endpoint.chats(figures["key"])
    assert refused.value.code == "insufficient_scope"
    context = ssl.create_default_context(cafile=tls_endpoint.ca_file(endpoint.site.layout))
    scraped = httpx.get(f"https://127.0.0.1:{endpoint.site.port}/metrics", verify=context,
                        headers={"Authorization": f"Bearer {figures['key']}"})
    assert scraped.status_code == 200
    assert "vllm:" in scraped.text
    with pytest.raises(openai.PermissionDeniedError):
        endpoint.client(figures["key"]).models.list()

    bots = [endpoint.json("apikey", "new", "--name", f"bot {i}", "--group", "search") for i in range(2)]
    assert [bot["group"] for bot in bots] == ["search", "search"]
    assert team["group"] is None
    prompt = "one two three four five six seven eight nine ten " * 4
    found = [endpoint.cached(key["key"], prompt) for key in (bots[0], bots[1], team)]
    assert (found[0], found[1] > 0, found[2]) == (0, True, 0)
    assert "search" in endpoint.atoll("apikey", "list")

    assert endpoint.json("apikey", "revoke", "team a")["changed"]
    with pytest.raises(openai.AuthenticationError):
        endpoint.chats(team["key"])
    assert endpoint.chats(endpoint.key)
    assert endpoint.site.service.state().pid == pid  # nothing was restarted

    listed = {entry["name"]: entry for entry in endpoint.json("apikey", "list")["keys"]}
    assert listed["team a"]["state"] == "revoked"
    assert listed["grafana"]["scopes"] == ["metrics"]
    assert team["key"] not in endpoint.atoll("apikey", "list")
    assert "team a" in endpoint.atoll("apikey", "list")


def test_a_key_may_go_to_a_file_that_only_its_owner_reads(endpoint: Endpoint, tmp_path: Path) -> None:
    out = tmp_path / "batch.key"
    shown = endpoint.atoll("apikey", "new", "--name", "batch", "--out", out)
    key = out.read_text().strip()
    assert key not in shown
    assert oct(out.stat().st_mode & 0o777) == "0o600"
    assert endpoint.chats(key)
    endpoint.atoll("apikey", "new", "--name", "again", "--out", out, code=2)
    assert out.read_text().strip() == key
    missing = tmp_path / "absent/dir/key"
    before = len(endpoint.json("apikey", "list")["keys"])
    endpoint.atoll("apikey", "new", "--name", "lost", "--out", missing, code=30)
    assert len(endpoint.json("apikey", "list")["keys"]) == before  # a key that nobody got is not left valid


@pytest.mark.parametrize("arguments, words", [
    (["new", "--name", "x", "--scope", "root"], "scopes are"),
    (["new", "--name", "x", "--group", "a\nb"], "group"),
    (["new", "--name", "x", "--expires", "soon"], "90d"),
    (["new", "--name", "x", "--expires", "2020-01-01"], "90d"),
    (["revoke", "sk-" + "a" * 43], "its id"),
    (["revoke", "nobody"], "atoll apikey list"),
])
def test_what_apikey_refuses(endpoint: Endpoint, arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "appliance.cli", "apikey", *arguments, "--prefix", str(endpoint.site.prefix)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_renewed_certificate_is_served_after_the_restart_that_status_asks_for(endpoint: Endpoint) -> None:
    site = endpoint.site
    before = endpoint.json("tls", "show")
    renewed = endpoint.json("tls", "renew")
    assert renewed["sha256"] != before["sha256"]
    assert renewed["ca"] == before["ca"]
    assert "atoll restart --prefix" in renewed["note"]
    facts = status(site.layout)
    assert not facts["healthy"]
    assert "another certificate" in facts["health"]["said"]
    assert endpoint.chats(endpoint.key)  # the old one still holds for clients
    restart(site.layout, Witness(), service=site.service, timeout=60)  # type: ignore[arg-type]
    assert status(site.layout)["healthy"]
    assert endpoint.chats(endpoint.key)


def test_a_customers_certificate_is_served(site: Site, tiny_bundle: Path, tmp_path: Path) -> None:
    endpoint = Endpoint(site, tiny_bundle)
    issuer = Issuer("Corp Issuing CA", Issuer("Corp Root"))
    key, leaf = issuer.issue([socket.gethostname().lower(), "127.0.0.1"])
    (tmp_path / "c.pem").write_bytes(pem(leaf, *issuer.chain()))
    (tmp_path / "k.pem").write_bytes(pem(key))
    os.chmod(tmp_path / "k.pem", 0o600)
    endpoint.atoll("tls", "import", "--cert", tmp_path / "c.pem", "--key", tmp_path / "k.pem", "--name", "no.such.name",
                   code=2)
    shown = endpoint.json("tls", "import", "--cert", tmp_path / "c.pem", "--key", tmp_path / "k.pem")
    assert (shown["source"], len(shown["chain"])) == ("imported", 2)
    stop(site.layout, service=site.service)
    start(site.layout, Witness(), service=site.service, timeout=60)  # type: ignore[arg-type]
    root = tmp_path / "root.pem"
    root.write_bytes(pem(issuer.root))
    assert endpoint.chats(endpoint.key, root)
    assert status(site.layout)["healthy"]
    endpoint.atoll("tls", "export-ca", code=2)
    endpoint.atoll("tls", "renew", code=2)


def test_plain_http_on_the_network_is_refused_by_the_server_itself(
    tiny_llama_dir: Callable[..., Path], free_port: Callable[[], int]
) -> None:
    command = [sys.executable, "-m", "appliance.cli", "serve", str(tiny_llama_dir("gqa")), "--host", "0.0.0.0",
               "--port", str(free_port()), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Plain HTTP" in done.stderr
    assert "--ssl-certfile" in done.stderr
