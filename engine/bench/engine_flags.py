"""Flags that every benchmark of a whole engine has."""

import argparse


def add_engine_flags(parser: argparse.ArgumentParser, *, load_format: str = "dummy") -> None:
    words = "dummy: random weights from config.json alone" + (" (default)" if load_format == "dummy" else "")
    parser.add_argument("--load-format", default=load_format, choices=["dummy", "auto"], help=words)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
