"""What is verified: an endpoint and, if it is this installation's, its files and processes too."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.load.target import Target
from appliance.service.model_config import read_config
from installer.access import api_keys
from installer.base.errors import usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.preflight.lookup_tables import text_config
from installer.release import config, release
from installer.service.choice import service_for
from installer.service.reload import reload_gateway

KEY_NAME = "atoll verification"    # of the key that a run makes and removes
_KEY_SECONDS = 31 * 86_400         # a killed run leaves its key no longer than the longest soak test lasts


@dataclass
class Served:
    """One model behind the endpoint. `bundle`: the name that its vendor gave it."""

    name: str
    bundle: str
    directory: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def real_weights(self) -> bool:
        return self._setting("load-format") != "dummy"

    @property
    def on_gpu(self) -> bool:
        return self.settings.get("device", "auto") != "cpu"

    @property
    def stored_quantised(self) -> bool:
        """Whether its checkpoint holds quantised weights."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            if self.directory is not None:
                whole = read_config(self.directory)
                named = any(part.get(name) for part in (whole, text_config(whole))
                            for name in ("quantization_config", "compression_config"))  # fmt: skip
                return named or (self.directory / "hf_quant_config.json").is_file()
        return False

    @property
    def quantised_while_loading(self) -> bool:
        """Whether its settings quantise weights or the KV cache."""
        kv = str(self._setting("kv-cache-dtype") or "auto")
        return bool(self._setting("quantization")) or kv.startswith(("fp8", "int"))

    def _setting(self, name: str) -> Any:
        return config.with_dashes(self.settings).get(name)

    @property
    def family(self) -> str:
        """The model's type from its config.json; empty if that cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            if self.directory is not None:
                return str(read_config(self.directory).get("model_type", ""))
        return ""


@dataclass
class Subject:
    """`layout` is None for an endpoint elsewhere: checks of its files and processes are skipped then."""

    target: Target
    models: list[Served]
    layout: Layout | None = None
    endpoint: config.Endpoint | None = None
    release: str | None = None

    def pids(self) -> frozenset[int]:
        """Live processes of the service; empty if they are on another machine."""
        return service_for(self.layout).pids() if self.layout is not None else frozenset()

    def of(self, model: Served) -> Target:
        return Target(self.target.base_url, model.name, key=self.target.key, ca=self.target.ca,
                      pinned=self.target.pinned)  # fmt: skip

    def tagged(self, name: str, model: Served) -> str:
        """A finding's id; with several models, it names the model."""
        return name if len(self.models) == 1 else f"{name}@{model.name}"


@contextlib.contextmanager
def of_installation(
    layout: Layout, *, key_name: str = KEY_NAME, scopes: tuple[str, ...] = ("serve", "metrics")
) -> Iterator[Subject]:
    """This installation, with a separate API key that is removed afterwards. Raises InstallError."""
    committed = history_of(layout).committed
    if committed is None:
        raise usage_error(t("Nothing is installed that could be verified."), t("Install first: atoll checklist run"))
    endpoint = config.standing(layout)
    text = config.read_text(layout.config)
    tables = config.model_tables(text, layout.config) if layout.system else {}
    common = {} if layout.system or not text else config.parse(text, layout.config)
    models = [
        Served(str(bundle["instance"]), str(bundle["name"]), layout.models / str(bundle.get("digest", "")),
               tables.get(str(bundle["instance"]), common))
        for bundle in release.bundles_of(committed)
    ]  # fmt: skip
    with _own_key(layout, key_name, scopes) as key:
        target = Target(endpoint.url, key=key, pinned=endpoint.certificate)
        yield Subject(target, models, layout, endpoint, str(committed["release"]))


@contextlib.contextmanager
def _own_key(layout: Layout, name: str, scopes: tuple[str, ...]) -> Iterator[str]:
    _remove_keys(layout, name)  # left by a run that was killed
    key = api_keys.add(layout.api_keys, name, lifetime=_KEY_SECONDS, scopes=scopes)
    try:
        reload_gateway(layout)
        yield key.text
    finally:
        _remove_keys(layout, name)
        reload_gateway(layout)


def _remove_keys(layout: Layout, name: str) -> None:
    mine = {str(entry["id"]) for entry in api_keys.read(layout.api_keys) if entry.get("name") == name}
    if mine:
        api_keys.remove(layout.api_keys, mine)
