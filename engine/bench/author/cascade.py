"""``cascade``: decode attention of sequences that share a prefix, which is read for each of them or once for many.

DIR needs only a config.json: of it the heads are taken. Steps take turns with the caches of several layers, so that a
layer's own pages are in no cache when their turn comes, as in a model.

``--search`` times variants of the kernel that reads the prefix, for the constants in attention.shared_prefix.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.core.kv.spec import pages_for
from engine.errors import ConfigError
from engine.kernels.tuning.timing import step_seconds
from engine.models.config.model import ModelConfig

DEFAULT_MODELS = ("qwen3-8b",)
_PAGE = 16
_LAYERS = 8   # with caches of their own
_TURNS = 2    # of all layers in a graph
_TILES = ((64, 8, 2), (64, 8, 3), (64, 8, 4), (128, 8, 2), (128, 8, 3), (32, 8, 3), (32, 4, 3), (64, 4, 2))
_SPLITS = (1, 2, 4, 8)
_CACHES = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, nargs="*", default=(8, 16, 32, 64, 128, 256))
    parser.add_argument("--prefixes", type=int, nargs="*", default=(128, 512, 2048, 8192), help="tokens")
    parser.add_argument("--own", type=int, default=128, help="tokens of each sequence behind the prefix (default 128)")
    parser.add_argument("--kv-cache-dtype", choices=list(_CACHES), default="auto")
    parser.add_argument("--search", action="store_true", help="time variants of the kernel")


class Heads:
    """The attention of a model's config.json."""

    def __init__(self, raw: dict[str, Any]) -> None:
        text = raw.get("text_config", raw)
        self.query, self.key = text["num_attention_heads"], text["num_key_value_heads"]
        self.dim = text.get("head_dim") or text["hidden_size"] // self.query


class Layers:
    """Queries of a step, and the caches of several layers, in which all sequences begin with the same pages."""

    def __init__(
        self, heads: Heads, sequences: int, prefix: int, own: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        common, rest = prefix // _PAGE, pages_for(own, _PAGE)
        shape = 2, 1 + common + sequences * rest, _PAGE, heads.key, heads.dim
        self.caches = [
            torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype).unbind(0) for _ in range(_LAYERS)
        ]
        table = torch.zeros(sequences, common + rest, dtype=torch.int32)
        table[:, :common] = torch.arange(1, common + 1)
        table[:, common:] = torch.arange(common + 1, shape[1]).view(sequences, rest)
        self.table = table.to(device)
        ints = {"dtype": torch.int32, "device": device}
        self.rows = torch.arange(sequences, **ints)
        self.lengths = torch.full((sequences,), common * _PAGE + own, **ints)
        self.shared = torch.full((sequences,), common * _PAGE, **ints)
        self.q = torch.randn(sequences, heads.query, heads.dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.heads = heads

    def plain(self, multiprocessors: int) -> list[Callable[[], object]]:
        from engine.kernels.attention import decode

        slices = self._slices(multiprocessors)
        return [
            lambda k=k, v=v: decode.decode(
                self.q, k, v, self.rows, self.lengths, self.table, self.out, scale=0.1, shared=None, **slices
            )
            for k, v in self.caches
        ] * _TURNS

    def _slices(self, multiprocessors: int) -> dict[str, int]:
        """As layers.attention cuts sequences into slices."""
        from engine.kernels.attention import decode

        batch, heads = len(self.q), self.heads
        return {
            "splits": decode.num_splits(batch, heads.key, multiprocessors),
            "shortest": decode.shortest_slice(batch, heads.key, heads.dim, multiprocessors),
        }

    def once(
        self, multiprocessors: int, options: Mapping[str, int] = MappingProxyType({}), *, tail: bool = True
    ) -> list[Callable[[], object]]:
        """`tail`: also each sequence's own tokens. `options`: of the kernel that reads the prefix."""
        from engine.kernels.attention import decode, shared_prefix

        slices = self._slices(multiprocessors)
        prefix_splits = shared_prefix.num_splits(len(self.q), self.heads.query, self.heads.key, multiprocessors)
        chosen = {"splits": prefix_splits, **options}

        def step(k: torch.Tensor, v: torch.Tensor) -> None:
            prefix = shared_prefix.attend_prefix(
                self.q, k, v, self.rows, self.shared, self.table, scale=0.1, **chosen
            )
            if tail:
                decode.decode(
                    self.q, k, v, self.rows, self.lengths, self.table, self.out, scale=0.1, shared=prefix, **slices
                )

        return [lambda k=k, v=v: step(k, v) for k, v in self.caches] * _TURNS


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    if device.type == "cpu":
        raise ConfigError("These kernels are a GPU's.", "--device")
    model = args.model or floor.CONFIGS / DEFAULT_MODELS[0]
    heads = Heads(ModelConfig.load(model).raw)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    facts = {"bench": "cascade", "engine": "atoll", "model": model.name, "kv_cache_dtype": args.kv_cache_dtype}
    for sequences, prefix in product(args.sequences, args.prefixes):
        layers = Layers(heads, sequences, prefix, args.own, _CACHES[args.kv_cache_dtype], device)
        yield {
            **facts, "sequences": sequences, "prefix": prefix, "own": args.own,
            **(searched(layers, multiprocessors, device) if args.search else measured(layers, multiprocessors, device)),
            **report.machine(device),
        }  # fmt: skip


def measured(layers: Layers, multiprocessors: int, device: torch.device) -> report.Row:
    """`pays`: whether the engine would read the prefix once."""
    from engine.kernels.attention.shared_prefix import pays

    plain = _us(layers.plain(multiprocessors), device)
    once = _us(layers.once(multiprocessors), device)
    return {
        "plain_us": plain, "once_us": once, "prefix_us": _us(layers.once(multiprocessors, tail=False), device),
        "ratio": round(plain / once, 2), "pays": pays(len(layers.q), int(layers.shared[0])),
    }  # fmt: skip


def searched(layers: Layers, multiprocessors: int, device: torch.device) -> report.Row:
    """The fastest variants, prefix and own tokens together, and the one that the engine takes."""
    from engine.kernels.runtime.compile_ahead import compile_ahead
    from engine.kernels.runtime.driver import KernelError
    from engine.kernels.runtime.launcher import recording

    variants = [
        {"tile": tile, "num_warps": warps, "num_stages": stages, "splits": splits}
        for (tile, warps, stages), splits in product(_TILES, _SPLITS)
    ]
    with recording() as jobs:
        for variant in variants:
            layers.once(multiprocessors, variant)[0]()
    compile_ahead(jobs, torch.cuda.get_device_capability(device))
    found = []
    for variant in variants:
        with contextlib.suppress(KernelError):  # more shared memory than there is
            found.append([_us(layers.once(multiprocessors, variant), device), *variant.values()])
    return {"now_us": _us(layers.once(multiprocessors), device), "best": sorted(found)[:8]}


def _us(steps: list[Callable[[], object]], device: torch.device) -> float:
    return round(step_seconds(steps, device) * 1e6, 1)
