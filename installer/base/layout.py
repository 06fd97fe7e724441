"""Where everything lives. One tree, under `/` on a server or under a prefix anywhere else.

    PREFIX/
      opt/atoll/releases/<id>/{bin/atoll, release.json}   code, immutable once staged
      opt/atoll/current -> releases/<id>                  the live one; switched by rename(2)
      var/lib/atoll/models/<digest>/                      weights, read-only
      var/lib/atoll/state/                                journal, audit, approvals, sequence, lock
      etc/atoll/{atoll.toml, trust/, credentials/}         the operator's; kept by uninstall
      var/cache/atoll   var/log/atoll   run/atoll

The system form adds, outside of these, what systemd reads: etc/systemd/system/atoll*, etc/sysusers.d/atoll.conf,
etc/tmpfiles.d/atoll.conf, and the command itself, usr/local/bin/atoll.
"""

from dataclasses import dataclass
from pathlib import Path

from installer.base.i18n import t


def code_root() -> Path:
    """The directory that our packages are imported from."""
    return Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Layout:
    """Every path below one prefix. `system`: run by systemd as its own users; otherwise a supervised process."""

    prefix: Path
    system: bool = False

    @classmethod
    def at(cls, prefix: Path | str) -> "Layout":
        """Absolute, without `..`, and with links above the prefix resolved, so that all paths stay comparable."""
        return cls(Path(prefix).expanduser().resolve())

    @classmethod
    def server(cls, root: Path | str = "/") -> "Layout":
        """The system form. A `root` other than / is a server's tree seen from outside."""
        return cls(Path(root).resolve(), system=True)

    @property
    def name(self) -> str:
        """What operators call this installation."""
        return t("this server") if self.system and self.prefix == Path("/") else str(self.prefix)

    @property
    def prefix_option(self) -> str:
        """Suffix of the commands that messages tell an operator to run: ` --prefix DIR`, empty on a server."""
        return "" if self.system else f" --prefix {self.prefix}"

    @property
    def opt(self) -> Path:
        return self.prefix / "opt/atoll"

    @property
    def releases(self) -> Path:
        return self.opt / "releases"

    @property
    def current(self) -> Path:
        return self.opt / "current"

    @property
    def code(self) -> Path:
        """Unpacked code, one directory for each runtime bundle; releases point into it."""
        return self.opt / "code"

    @property
    def lib(self) -> Path:
        return self.prefix / "var/lib/atoll"

    @property
    def models(self) -> Path:
        return self.lib / "models"

    @property
    def state(self) -> Path:
        return self.lib / "state"

    @property
    def series(self) -> Path:
        """What the sampler keeps; on a server it belongs to the sampler's user."""
        return self.lib / "series"

    @property
    def journal(self) -> Path:
        return self.state / "journal.jsonl"

    @property
    def audit(self) -> Path:
        return self.state / "audit.jsonl"

    @property
    def approvals(self) -> Path:
        return self.state / "approvals.json"

    @property
    def sequence(self) -> Path:
        return self.state / "sequence.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def checklist(self) -> Path:
        """What `atoll checklist` remembers before and after an install. Only that command creates it."""
        return self.prefix / "var/lib/atoll-checklist"

    @property
    def snapshots(self) -> Path:
        """What each committed release ran with: settings and unit files, one JSON file for each."""
        return self.state / "snapshots"

    @property
    def config_backup(self) -> Path:
        return self.state / "before-switch.toml"

    @property
    def key_backup(self) -> Path:
        """The endpoint's key and certificate as they were before an import that is not committed yet."""
        return self.credentials / "server.key.before"

    @property
    def etc(self) -> Path:
        return self.prefix / "etc/atoll"

    @property
    def config(self) -> Path:
        return self.etc / "atoll.toml"

    @property
    def trust(self) -> Path:
        return self.etc / "trust"

    @property
    def revoked(self) -> Path:
        """Keys that are never trusted again."""
        return self.trust / "revoked.json"

    @property
    def credentials(self) -> Path:
        return self.etc / "credentials"

    @property
    def api_keys(self) -> Path:
        return self.credentials / "api-keys.json"

    @property
    def tls(self) -> Path:
        return self.etc / "tls"

    @property
    def ca_cert(self) -> Path:
        return self.tls / "ca.crt"

    @property
    def server_cert(self) -> Path:
        return self.tls / "server.crt"

    @property
    def ca_key(self) -> Path:
        return self.credentials / "ca.key"

    @property
    def server_key(self) -> Path:
        return self.credentials / "server.key"

    @property
    def verify_state(self) -> Path:
        return self.state / "verify.json"

    @property
    def units(self) -> Path:
        return self.prefix / "etc/systemd/system"

    @property
    def sysusers(self) -> Path:
        return self.prefix / "etc/sysusers.d/atoll.conf"

    @property
    def tmpfiles(self) -> Path:
        return self.prefix / "etc/tmpfiles.d/atoll.conf"

    @property
    def command(self) -> Path:
        """The `atoll` that is on the PATH of a server: a link to the live release's."""
        return self.prefix / "usr/local/bin/atoll"

    @property
    def cache(self) -> Path:
        return self.prefix / "var/cache/atoll"

    @property
    def log_dir(self) -> Path:
        return self.prefix / "var/log/atoll"

    @property
    def log(self) -> Path:
        return self.log_dir / "serve.log"

    @property
    def log_hint(self) -> str:
        """Where the service's log is, as words for a hint."""
        return t("`atoll logs`") if self.system else str(self.log)

    @property
    def run(self) -> Path:
        return self.prefix / "run/atoll"

    @property
    def pidfile(self) -> Path:
        return self.run / "atoll.pid"

    @property
    def service_state(self) -> Path:
        return self.run / "service.json"

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories that are entirely ours: Atoll put everything in them."""
        ours = (self.opt, self.lib, self.etc, self.cache, self.run)
        return ours if self.system else (*ours, self.log_dir)

    def directories(self) -> list[tuple[Path, int]]:
        """Every directory of the tree with its mode, parents first. World-readable only if nothing in it is private.

        In the system form systemd makes the services' own directories below cache and run, each for its user.
        """
        shared = 0o755 if self.system else 0o700
        return [
            (self.opt, 0o755),
            (self.releases, 0o755),
            (self.code, 0o755),
            (self.lib, 0o755),
            (self.models, 0o755),
            (self.state, 0o700),
            (self.snapshots, 0o700),
            (self.etc, 0o755),
            (self.trust, 0o755),
            (self.credentials, 0o700),
            (self.cache, shared),
            (self.run, 0o755 if self.system else 0o750),
            (self.tls, 0o755),
            *([] if self.system else [(self.log_dir, 0o750)]),
        ]
