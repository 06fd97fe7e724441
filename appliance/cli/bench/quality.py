"""`atoll bench quality`: what a quantisation costs a model on this machine."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common import Json, examples

_EXAMPLES = examples("atoll bench quality /models/Qwen3-8B --quantization int8",
                     "atoll bench quality /models/Qwen3-8B --save /models/Qwen3-8B-AWQ/quality_reference.json",
                     "atoll bench quality /models/Qwen3-8B-AWQ --reference /models/Qwen3-8B --json")  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command(epilog=_EXAMPLES)(quality)


def quality(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The model's directory.")],
    quantization: Annotated[str | None, typer.Option(metavar="METHOD", help="Quantise it while it loads: fp8, int8, "
                                                                            "int4 or int4-g32.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Precision of the KV cache.")] = "auto",
    reference: Annotated[
        Path | None, typer.Option(metavar="DIR|FILE", help="The model in 16 bits, if DIR is quantised already, or what "
                                                           "--save wrote of it.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the scores: a reference for later runs and for atoll "
                                                       "verify-service.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text, about.")] = 4096,
    as_json: Json = False,
) -> None:
    """Compare a quantised model with its 16-bit form: perplexity, and how often both choose the same token.

    It reads an English and a Korean text that come with Atoll. The models load on this machine, one after the other.
    """
    # A process of its own: this command needs PyTorch, and no other of this program does.
    command = [sys.executable, "-s", "-P", "-m", "engine.bench", "quality", "--model", str(model), "--tokens",
               str(tokens), "--kv-cache-dtype", kv_cache_dtype]  # fmt: skip
    command += ["--quantization", quantization] if quantization else []
    command += ["--reference", str(reference)] if reference else []
    command += ["--save", str(save)] if save else []
    command += ["--json"] if as_json else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)
