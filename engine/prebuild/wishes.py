"""What kernels are wanted for: a model with these flags, on this GPU. One wish, or a file with many."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.message import msg
from engine.plan import shipped_shape
from engine.prebuild.gpus import GPUS
from engine.server.settings.commands import parse_engine


class Wish(NamedTuple):
    """`model`: a directory, or the name of a shape that comes with Atoll; `gpu`: a name of GPUS; `flags`: those of
    `atoll engine`."""

    model: str
    gpu: str
    flags: tuple[str, ...] = ()

    def config(self) -> EngineConfig:
        """What `atoll engine --model MODEL flags` runs. Weights only say how a quantised checkpoint stores them.

        Raises ConfigError."""
        place = shipped_shape(self.model) or Path(self.model)
        config = parse_engine(["--model", str(place), "--uds", "/", *self.flags]).engine
        return config if any(place.glob("*.safetensors")) else replace(config, load_format="dummy")


def read_wishes(path: Path) -> list[Wish]:
    """From a JSON file: [{"model": "qwen3-8b", "gpu": "h100", "flags": ["--max-num-seqs", "256"]}, …]. Raises
    ConfigError."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        found = [Wish(str(one["model"]), str(one["gpu"]), tuple(map(str, one["flags"]))) for one in raw]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(msg("{path} is not a list of wishes: {error}.", path=path, error=str(error)),
                          "--wishes") from None  # fmt: skip
    for wish in found:
        if wish.gpu not in GPUS:
            raise ConfigError(msg("No GPU called {gpu} is known.", gpu=wish.gpu), "--wishes",
                              msg("Known are {names}.", names=", ".join(sorted(GPUS))))  # fmt: skip
    return list(dict.fromkeys(found))
