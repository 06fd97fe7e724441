"""The text templates of systemd/, filled in: units, users, directories, as files to be written.

Templates contain `@NAME@` words. If a word has several values (addresses, devices), its line is repeated for each; if
it has none, the line is left out. The same input gives the same bytes, so an unchanged file is not written again, and
an unchanged unit is not restarted.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout, code_root

TARGET = "atoll.target"
SOCKET = "atoll-gateway.socket"
GATEWAY = "atoll-gateway.service"
GPU_READY = "atoll-gpu-ready.service"
SETTLE = "atoll-settle.service"
SAMPLER = "atoll-sampler.service"
VERIFY, TIMER = "atoll-verify.service", "atoll-verify.timer"
ENGINE_TEMPLATE = "atoll-engine@.service"
ENGINES = "atoll-engines.slice"

ENGINE_USER, GATEWAY_USER, SAMPLER_USER, GROUP = "atoll-engine", "atoll-gateway", "atoll-sampler", "atoll-api"
USERS = (ENGINE_USER, GATEWAY_USER, SAMPLER_USER)

# Device classes of NVIDIA's driver, by the names of /proc/devices: the first is "nvidia-frontend" before driver 545 and
# "nvidia" since; the capability classes are those of MIG and of NVSwitch hosts. One that is not there is skipped.
NVIDIA_CLASSES = ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-nvswitch",
                  "nvidia-caps-imex-channels")  # fmt: skip

_INSTANCE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_WORD = re.compile(r"@([A-Z_]+)@")

Values = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file of the system form. `path` is absolute, below the layout's prefix."""

    path: Path
    content: str
    mode: int = 0o644

    @property
    def changed(self) -> bool:
        """Whether the disk holds different content, or none."""
        try:
            return self.path.is_symlink() or self.path.read_text() != self.content
        except (OSError, UnicodeDecodeError):
            return True


def engine_unit(model: str) -> str:
    return f"atoll-engine@{model}.service"


def check_name(model: str) -> str:
    """Raises InstallError (usage) for a name that cannot serve as a unit instance, a directory and a TOML key."""
    if not _INSTANCE.fullmatch(model):
        raise InstallError(
            t("The model's name {model!r} cannot be used for a service.", model=model[:80]),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Use 1 to 63 of a-z 0-9 . _ -, beginning with a letter or a digit, such as chat or qwen3-8b."),
        )
    return model


def enabled(models: Iterable[str]) -> list[str]:
    """What starts at boot: the target, its parts, and one engine for each model."""
    return [TARGET, SOCKET, GATEWAY, SAMPLER, SETTLE, TIMER, *(engine_unit(model) for model in sorted(models))]


def render(
    layout: Layout,
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    gpus: Mapping[str, Sequence[str | int]] | None = None,
    gpu: bool = True,
    tls: bool = True,
    memory: str = "90%",
    watchdog: str = "120",
) -> list[UnitFile]:
    """Every file that systemd reads, for `models` (instance names) behind one gateway at `host`:`port`.

    `gpu` False is for engines on the CPU: no device is opened and none waited for. The GPUs of each engine are in
    atoll.toml and not here, so that they can change without new units; `gpus` is only checked to name known models.
    `memory` is systemd's MemoryMax= of all engines together. Raises InstallError for a bad name.
    """
    for model in {*models, *(gpus or {})}:
        check_name(model)
    values = _values(layout, address(host, port), gpu=gpu, tls=tls, memory=memory, watchdog=watchdog)
    names = [TARGET, SOCKET, GATEWAY, SAMPLER, ENGINE_TEMPLATE, ENGINES, SETTLE, VERIFY, TIMER,
             *([GPU_READY] if gpu else [])]  # fmt: skip
    files = [UnitFile(layout.units / name, fill(template(name), values)) for name in names]
    files.append(UnitFile(layout.sysusers, fill(template("sysusers.conf"), values)))
    files.append(UnitFile(layout.tmpfiles, fill(template("tmpfiles.conf"), values)))
    if gpu:
        files.append(UnitFile(modules_load(layout), fill(template("modules-load.conf"), values)))
    return files


def address(host: str, port: int) -> str:
    """A ListenStream= value. Raises InstallError for what is no address: systemd resolves no names.

    >>> address("::1", 8443)
    '[::1]:8443'
    """
    import ipaddress

    if host in ("", "*", "::", "[::]"):
        return str(port)  # all addresses, IPv4 and IPv6
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address({"localhost": "127.0.0.1"}.get(host, host.strip("[]")))
        return f"[{parsed}]:{port}" if parsed.version == 6 else f"{parsed}:{port}"
    raise InstallError(
        t("The address {host!r} is not an IP address.", host=host[:80]),
        exit_code=ExitCode.USAGE,
        changed=t("Nothing was changed."),
        hint=t("Give the address to listen on, such as 192.0.2.10, or 0.0.0.0 for every one."),
    )


def modules_load(layout: Layout) -> Path:
    return layout.prefix / "etc/modules-load.d/atoll.conf"


def owned_files(layout: Layout) -> list[Path]:
    """Every file that any `render` may have made, for an uninstall."""
    units = [TARGET, SOCKET, GATEWAY, SAMPLER, ENGINE_TEMPLATE, ENGINES, SETTLE, VERIFY, TIMER, GPU_READY]
    return [*(layout.units / name for name in units), layout.sysusers, layout.tmpfiles, modules_load(layout)]


def owned_paths(layout: Layout) -> list[Path]:
    """Directories that systemd makes for the units and that lie outside `layout.roots`: none."""
    return []


def write(files: Iterable[UnitFile]) -> list[UnitFile]:
    """Write the files that differ, durably. Returns them. The operator's drop-ins beside them are ignored."""
    changed = [file for file in files if file.changed]
    for file in changed:
        fs.make_dir(file.path.parent)
        fs.write_atomic(file.path, file.content, file.mode)
    return changed


def remove(paths: Iterable[Path]) -> list[Path]:
    """Remove the files, durably. Returns those that existed. Directories with the operator's drop-ins stay."""
    gone = [path for path in paths if path.is_symlink() or path.exists()]
    for path in gone:
        fs.remove_file(path)
        fs.fsync_dir(path.parent)
    return gone


def to_restart(changed: Iterable[UnitFile | Path]) -> set[str]:
    """Which of the services must restart for these changed files: "gateway", "engine", or neither."""
    names = {(file.path if isinstance(file, UnitFile) else file).name for file in changed}
    kinds = {GATEWAY: {"gateway"}, SOCKET: {"gateway"}, ENGINE_TEMPLATE: {"engine"}, "atoll.conf": set[str]()}
    return {kind for name in names for kind in kinds.get(name, set())}


def template(name: str) -> str:
    return (code_root() / "systemd" / name).read_text("utf-8")


def fill(text: str, values: Values) -> str:
    """`text` with its `@NAME@` words replaced. Raises KeyError for a word without a value."""
    lines: list[str] = []
    for line in text.splitlines():
        lists = [word for word in _WORD.findall(line) if not isinstance(values[word], str)]
        if not lists:
            lines.append(_WORD.sub(lambda match: str(values[match[1]]), line).rstrip())
            continue
        word, = lists
        for value in values[word]:
            filled = line.replace(f"@{word}@", value)
            lines.append(_WORD.sub(lambda match: str(values[match[1]]), filled).rstrip())
    return "\n".join(lines) + "\n"


def _values(layout: Layout, listen: str, *, gpu: bool, tls: bool, memory: str, watchdog: str) -> Values:
    def inside(path: Path) -> str:
        """The path as the server itself sees it."""
        return str(Path("/") / path.relative_to(layout.prefix))

    # One file holds the key and its certificates: two files could be read while only one of them has been replaced.
    tls_flags = "--ssl-certfile %d/server.key --ssl-keyfile %d/server.key" if tls else ""
    return {
        "CURRENT": inside(layout.current),
        "OPT": inside(layout.opt),
        "ETC": inside(layout.etc),
        "STATE": inside(layout.state),
        "SERIES": inside(layout.series),
        "MODELS": inside(layout.models),
        "CACHE": inside(layout.cache),
        "RUN": inside(layout.run),
        "ENGINE_USER": ENGINE_USER,
        "GATEWAY_USER": GATEWAY_USER,
        "SAMPLER_USER": SAMPLER_USER,
        "GROUP": GROUP,
        "LISTEN": listen,
        "TLS": tls_flags,
        "TLS_KEY": [inside(layout.server_key)] if tls else [],
        "GPU_READY": [GPU_READY] if gpu else [],
        "DEVICE": [f"char-{name} rw" for name in NVIDIA_CLASSES] if gpu else [],
        "ENGINES": ENGINES,
        "ENGINE_MEMORY": memory,
        "GATEWAY_MEMORY": "8G",
        "WATCHDOG": watchdog,
    }
