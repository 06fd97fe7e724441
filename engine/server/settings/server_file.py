"""The settings file of a server, as its services read it::

    [gateway]                 # flags of `atoll gateway`
    [gateway.limits]          # bounds of the endpoint: engine.server.settings.limit_settings
    [engine]                  # flags of every engine
    [models.chat]             # the engine atoll-engine@chat; its values win over [engine]
    model = "/var/lib/atoll/models/…/model"
    [models.chat-2]           # one more engine that answers under the name chat, with the settings of [models.chat]
    replica-of = "chat"
    gpus = ["1"]

Each key is a long flag without its dashes, so one set of rules reads the command line and the file.
"""

import re
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.message import msg
from engine.server.settings.sources import LIMITS, read_toml, table_argv

REPLICA_OF = "replica-of"
_INSTANCE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
# "0", "GPU-5d1c…", "MIG-…": what CUDA_VISIBLE_DEVICES takes, one at a time
_GPU = re.compile(r"\d{1,3}|(GPU|MIG)-[0-9a-fA-F/-]{4,64}")


def model_names(path: Path) -> list[str]:
    """The names of the models in the file, in its order. Raises ConfigError."""
    models = _table(read_toml(path), "models", path)
    for name, table in models.items():
        if not _INSTANCE.fullmatch(name) or not isinstance(table, dict):
            raise ConfigError(msg("{path}: [models.{name}] does not name a model.", path=path, name=name[:80]),
                              "--config", msg("A name has 1 to 63 of the characters a-z 0-9 . _ - and begins with a "
                                              "letter or a digit."))
    return list(models)


def engine_argv_of(name: str, path: Path) -> list[str]:
    """The flags of one model's engine. Raises ConfigError."""
    if name not in model_names(path):
        raise ConfigError(msg("{path} has no [models.{name}].", path=path, name=name[:80]), "--model",
                          msg("It has: {path}.", path=", ".join(model_names(path)) or "none"))
    content = read_toml(path)
    own = _keys(content["models"][name])
    first = str(own.get(REPLICA_OF) or name)
    inherited = _inherited(content["models"], name, first, path) if REPLICA_OF in own else {}
    merged = {"served-model-name": first, **_keys(_table(content, "engine", path)), **inherited, **own}
    if not merged.get("model"):
        raise ConfigError(msg("{path}: [models.{name}] lacks 'model', the directory of the weights.",
                              path=path, name=name), "--model")
    return table_argv(merged, f"{path}, [models.{name}]")


def _inherited(models: dict[str, Any], name: str, first: str, path: Path) -> dict[str, Any]:
    """What a replica takes from the table of its model: all but the GPUs. Raises ConfigError."""
    table, own = _keys(models.get(first, {})), _keys(models[name])
    if first == name or not table or REPLICA_OF in table:
        raise ConfigError(msg("{path}: [models.{name}] is a replica of {first}, which is no model of its own.",
                              path=path, name=name, first=first[:80]), "--" + REPLICA_OF)
    for key in ("model", "served-model-name"):
        if key in own:
            raise ConfigError(msg("{path}: [models.{name}] is a replica, so its {key} is that of [models.{first}].",
                                  path=path, name=name, key=key, first=first), "--" + key,
                              msg("Remove that line."))
    return {key: value for key, value in table.items() if key != "gpus"}


def gateway_argv_of(path: Path) -> list[str]:
    """The flags of the gateway; none if the file has no table for it. Raises ConfigError."""
    table = _table(read_toml(path), "gateway", path)
    return table_argv({key: value for key, value in table.items() if key != LIMITS}, f"{path}, [gateway]")


def check_gpus(gpus: list[str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for indices or UUIDs, as they were given. Raises ConfigError."""
    wanted = [part for gpu in gpus for part in gpu.split(",")]
    for gpu in wanted:
        if not _GPU.fullmatch(gpu):
            raise ConfigError(msg("--gpus {gpu} is neither an index nor a UUID of a GPU.", gpu=f"{gpu[:80]!r}"),
                              "--gpus",
                              msg("nvidia-smi -L lists both."))
    if len(set(wanted)) < len(wanted):
        raise ConfigError(msg("--gpus names a GPU twice."), "--gpus")
    return ",".join(wanted)


def _table(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(msg("{path}: {name} must be a table, [{name_2}].", path=path, name=name, name_2=name),
                          "--config")
    return table


def _keys(table: dict[str, Any]) -> dict[str, Any]:
    """The table with one spelling of keys, so that a model's max_model_len wins over the engine's max-model-len."""
    return {key.replace("_", "-"): value for key, value in table.items()}
