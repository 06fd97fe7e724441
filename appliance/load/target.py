"""The target of the load: an OpenAI endpoint, with its key and certificates."""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from installer.base.errors import usage_error
from installer.base.i18n import reason, t

KEY_VARIABLE = "OPENAI_API_KEY"  # as `vllm bench serve` and the openai package name it
_MOST_KEY = 4096
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Target:
    """`base_url` is without /v1. `ca`: certificates to trust instead of the system's. `pinned`: accept exactly this
    certificate, whatever its names and dates. `key` is never shown."""

    base_url: str
    model: str | None = None
    path: str | None = None
    key: str | None = field(default=None, repr=False)
    ca: Path | None = None
    pinned: Path | None = None
    headers: tuple[tuple[str, str], ...] = ()
    connect_timeout: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        try:
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            good = False
        if not good or parts.query or parts.fragment or parts.username:
            raise usage_error(t("'{url}' is not the address of an endpoint.", url=self.base_url),
                              t("Write it as https://server:8443, without a key in it."))

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.base_url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.base_url).scheme == "https"

    @property
    def root(self) -> str:
        """The path below which the API lies. A base URL that ends in /v1 is accepted."""
        path = urlsplit(self.base_url).path.rstrip("/")
        return path[: -len("/v1")] if path.endswith("/v1") else path

    def path_of(self, endpoint: str) -> str:
        return self.root + (self.path or _PATHS[endpoint])

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises InstallError (usage) if the certificates cannot be read."""
        if not self.is_tls:
            return None
        if self.pinned is not None:  # the connection compares the certificate itself
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except (OSError, ssl.SSLError) as error:
            raise usage_error(t("The certificate {path} cannot be used: {why}.", path=self.ca, why=reason(error)),
                              t("Export the local CA on the server: atoll tls export-ca")) from None

    def pinned_der(self) -> bytes | None:
        if self.pinned is None:
            return None
        text = self.pinned.read_text()
        first = text[text.index("-----BEGIN") : text.index("-----END CERTIFICATE-----") + 25]
        return ssl.PEM_cert_to_DER_cert(first)


def read_key(file: Path | None) -> str | None:
    """The API key from `file`, else from $OPENAI_API_KEY, else none. Raises InstallError (usage)."""
    if file is None:
        text = os.environ.get(KEY_VARIABLE, "")
        where = f"${KEY_VARIABLE}"
    else:
        where = str(file)
        try:
            with file.open("rb") as opened:
                text = opened.read(_MOST_KEY + 1).decode("ascii")
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else t("it is not text")
            raise usage_error(t("The API key's file {path} cannot be used: {why}.", path=file, why=why),
                              t("Put the key alone into a file that only you may read.")) from None
    key = text.strip()
    if not key:
        if file is not None:
            raise usage_error(t("The API key's file {path} is empty.", path=file), t("Put the key alone into it."))
        return None
    if len(key) > _MOST_KEY or not key.isprintable() or " " in key or not key.isascii():
        raise usage_error(t("{where} does not hold one API key.", where=where), t("Put the key alone into it."))
    return key
