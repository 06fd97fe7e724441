"""Weights into a model, one module at a time: memory, values, then the module's final form, and on to the next.

A model is built without memory (its parameters are on the `meta` device). Only the module that is being filled holds
weights in two forms, so a model that is quantised while it loads needs its quantised size and a little.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.errors import ConfigError, ModelError
from engine.layers.embed import Embedding, LMHead
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear, RoutedExperts
from engine.layers.quant import FORMATS
from engine.layers.weight_memory import for_good, weight_pool
from engine.message import msg
from engine.models.base import CausalLM, Weights
from engine.models.loading.checkpoint import TensorInfo, check_checkpoint
from engine.models.loading.quantized import plain_name
from engine.models.loading.reader import DTYPES, Reader, read_into

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
_CPU = torch.device("cpu")
_CONVERTIBLE = {name: DTYPES[name] for name in ("F64", "F32", "F16", "BF16")}  # into each other, while they load
_RANDOM_BLOCK = (8 << 20) + 1  # elements; not a multiple of a row, so that rows differ


def quantize(model: nn.Module, name: str, stored: str | None = None) -> None:
    """Before loading: quantise the decoder's linear layers that the format supports, and the output head if the format
    has a method for it.

    `stored`: how the checkpoint is quantised already. Then `name` may only say the same; else it is a key of `FORMATS`.
    Raises ConfigError.
    """
    if stored is not None:
        if name != stored:
            raise ConfigError(
                msg("--quantization {name}: the checkpoint is quantised already ({stored}).", name=name, stored=stored),
                "--quantization", msg("Leave the flag out: the checkpoint says how it is stored."),
            )  # fmt: skip
        return
    if name not in FORMATS:
        raise ConfigError(
            msg("--quantization {name}: the checkpoint is not quantised so.", name=name), "--quantization",
            msg("Leave the flag out to run the checkpoint in its own precision."),
        )  # fmt: skip
    quantized = FORMATS[name]
    for module in model.modules():
        if isinstance(module, LMHead) and quantized.head is not None and quantized.head.supports(module):
            module.use(quantized.head)
        elif isinstance(module, Linear) and module.quantizable and quantized.linear.supports(module):
            module.use(quantized.linear)
        elif isinstance(module, RoutedExperts):
            both = module.gate_up_proj, module.down_proj
            fitting = [linear for linear in both if linear.quantizable and quantized.experts.supports(linear)]
            if len(fitting) == 2 or quantized.experts.fused:  # else the kernels want both in one form
                for linear in fitting:
                    linear.use(quantized.experts)


def compute_in(model: CausalLM, dtype: torch.dtype) -> None:
    """Before loading, on a CPU: compute activations and GEMMs in `dtype`. Weights are still rounded to the model's."""
    model.compute_dtype = dtype
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear | Embedding):
            module.compute_dtype = dtype


def load_weights(
    model: CausalLM, model_dir: Path, progress: Progress | None = None, device: torch.device = _CPU
) -> None:
    """Fill `model` on `device`. Raises ModelError naming the first tensor that is missing, unexpected or misshapen."""
    tensors = check_checkpoint(model_dir)
    model.adapt(tensors if model.stored is None else [plain_name(name) for name in tensors])
    weights = model.weights()  # once: slow with thousands of experts
    _check_names(model, weights, model_dir, tensors)
    order, in_place = _order(model, weights), _in_place(weights)
    total, done = sum(tensors[name].num_bytes for name in order), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress("loading weights", done, total)

    with ExitStack() as stack:
        if device.type == "cuda":
            copy = _read_files(stack, tensors, [name for name in order if name not in in_place], device)
        else:
            copy = _map_files(stack, tensors)

        def fill(name: str, target: torch.Tensor) -> None:
            if name in in_place:
                read_into(tensors[name], target, advance)
            else:
                copy(name, target)
                advance(tensors[name].num_bytes)

        _materialize(model, weights, device, fill)


def fill_randomly(model: CausalLM, seed: int = 0, device: torch.device = _CPU) -> None:
    """Random weights in the real shapes (load_format="dummy"): benchmarks and sizing without a checkpoint."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = model.weights()
    in_place = _in_place(weights)

    def fill(name: str, target: torch.Tensor) -> None:
        if name.endswith(("norm.weight", "layer_scalar")):
            target.fill_(1)
        elif name in in_place:
            _fill_with_copies(target, seed)
        else:
            _fill_any(model, name, target, generator)

    _materialize(model, weights, device, fill)


def fill_with_nothing(model: CausalLM) -> None:
    """Weights without content, in host memory that nothing has touched: for code that only looks at shapes."""

    def fill(name: str, target: torch.Tensor) -> None:
        _fill_checked(model, name, target)

    _materialize(model, model.weights(), _CPU, fill)


def _fill_checked(model: CausalLM, name: str, target: torch.Tensor) -> bool:
    """Fill a tensor of which a quantisation format allows only some values. Returns whether it is one."""
    if model.stored is None:
        return False
    if name.endswith("g_idx"):  # columns in order
        target.zero_()
    elif name.endswith("global_scale"):
        target.fill_(1)
    elif name.endswith("qzeros"):
        stored = model.stored.format_of(name.removesuffix(".qzeros"))
        assert stored is not None
        target.fill_(stored.dummy_zero_word())
    else:
        return False
    return True


def _fill_any(model: CausalLM, name: str, target: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers of any type: those of quantised weights are bits, of which all but NaN are allowed."""
    if _fill_checked(model, name, target):
        return
    if name.endswith(("scale", "scales", "scale_inv")) and target.dtype.is_floating_point:
        target.copy_(torch.rand(target.shape, generator=generator, device=target.device) * 0.02 + 0.01)
    elif target.dtype.is_floating_point and target.dtype.itemsize > 1:
        target.normal_(0, 0.02, generator=generator)
    elif target.dtype == torch.float8_e4m3fn:
        target.copy_(torch.randn(target.shape, generator=generator, device=target.device))
    else:
        target.view(torch.uint8).random_(0, 127, generator=generator)


def _refuse_quantised(missing: list[str], tensors: dict[str, TensorInfo]) -> None:
    """Embeddings and such are read in 16 bits only. Without this, the message would be that their tensor is missing."""
    wanted = set(missing)
    for name in tensors:
        if name not in wanted and (plain := plain_name(name)) != name and plain in wanted:
            raise ModelError(msg("The checkpoint holds {name}, but {plain} is expected: this tensor is quantised, and "
                                 "config.json does not say so, or Atoll reads it in 16 bits only.", name=name,
                                 plain=plain),
                             msg("Use another quantisation of this model, or the model in bfloat16."))


def _check_names(model: CausalLM, wanted: Weights, model_dir: Path, tensors: dict[str, TensorInfo]) -> None:
    skipped: dict[str, list[str]] = {}

    def ignored(name: str) -> bool:
        if model.ignores(name):
            return True
        return model.stored is not None and (model.stored.ignores(name) or model.ignores(plain_name(name)))

    for name in tensors:
        if name not in wanted and name not in model.kv_scales and ignored(name):
            skipped.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for part, names in sorted(skipped.items()):
        log.info("Not loaded, as the model has no use for it: %s of %s.", _and_more(names), part)
    missing = [name for name in wanted if name not in tensors]
    _refuse_quantised(missing, tensors)
    if missing:
        raise ModelError(msg("The checkpoint {model_dir} lacks tensor {missing}.", model_dir=model_dir,
                             missing=_and_more(missing)))
    if unexpected := [name for name in tensors if name not in wanted and not ignored(name)]:
        raise ModelError(msg("The checkpoint {model_dir} holds tensor {unexpected}, which this "
                             "architecture does not have.", model_dir=model_dir,
                             unexpected=_and_more(unexpected)))
    for name, target in wanted.items():
        dtype = tensors[name].dtype
        if tensors[name].shape != tuple(target.shape):
            raise ModelError(msg("Tensor {name} has shape {shape} in the checkpoint; config.json "
                                 "implies {shape_2}.", name=name, shape=list(tensors[name].shape),
                                 shape_2=list(target.shape)))
        if target.dtype in _CONVERTIBLE.values():
            if dtype not in _CONVERTIBLE:  # means nothing without its scale
                raise ModelError(msg("Tensor {name} is {dtype} in the checkpoint, and no scale is beside it.",
                                     name=name, dtype=dtype),
                                 msg("Use the checkpoint in bfloat16: --quantization fp8 quantises it while it loads."))
        elif DTYPES[dtype] != target.dtype:  # quantised: its bits must not be converted
            expected = next(known for known, torch_dtype in DTYPES.items() if torch_dtype == target.dtype)
            raise ModelError(msg("Tensor {name} is {dtype} in the checkpoint; its quantisation format stores "
                                 "{expected}.",
                                 name=name, dtype=dtype, expected=expected))


def _read_files(
    stack: ExitStack, tensors: dict[str, TensorInfo], order: list[str], device: torch.device
) -> Callable[[str, torch.Tensor], None]:
    reader = stack.enter_context(Reader([tensors[name] for name in order], device))
    return lambda _name, target: reader.copy_to(target)


def _map_files(stack: ExitStack, tensors: dict[str, TensorInfo]) -> Callable[[str, torch.Tensor], None]:
    files = {s: stack.enter_context(safe_open(s, framework="pt")) for s in {t.shard for t in tensors.values()}}
    return lambda name, target: target.copy_(files[tensors[name].shard].get_tensor(name))  # type: ignore[func-returns-value]


def _in_place(weights: Weights) -> set[str]:
    """Names of parameters that have memory before loading: tables that stay on the host (Embedding.keep_on_host)."""
    return {name for name, target in weights.items() if not target.is_meta}


def _fill_with_copies(target: torch.Tensor, seed: int) -> None:
    """Repeat one block of random numbers: drawing a whole table on a CPU would take a minute."""
    flat = target.view(-1)
    block = torch.empty(min(_RANDOM_BLOCK, flat.numel()), dtype=target.dtype)
    block.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])


def _materialize(
    model: CausalLM, weights: Weights, device: torch.device, fill: Callable[[str, torch.Tensor], None]
) -> None:
    """Give every parameter memory on `device` and let `fill(checkpoint name, target)` set its parts, module by module.

    A parameter that has memory already is filled where it is; one that two modules share stays shared. Buffers (tables
    that constructors compute) move to the device.
    """
    parts = _parts(weights)
    with weight_pool(device) as model.weight_pool:
        _materialize_all(model, device, fill, parts)


def _materialize_all(
    model: CausalLM,
    device: torch.device,
    fill: Callable[[str, torch.Tensor], None],
    parts: dict[int, list[tuple[str, torch.Tensor]]],
) -> None:
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    shared: dict[int, nn.Parameter] = {}
    for module in _children_first(model):
        stays = not (isinstance(module, Linear | ExpertLinear) and module.method.converts)
        for key, empty in module._parameters.items():
            if empty is None:
                continue
            parameter = shared.get(id(empty))
            if parameter is None:
                memory = _memory(empty, device, stays=stays) if empty.is_meta else empty
                parameter = nn.Parameter(memory, requires_grad=False)
                for name, part in parts.get(id(empty), ()):
                    fill(name, parameter.as_strided(part.shape, part.stride(), part.storage_offset()))
                if uses[id(empty)] > 1:
                    shared[id(empty)] = parameter
            setattr(module, key, parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                setattr(module, key, buffer.to(device))
        _finalize(module)
        if model.compute_dtype is not None:
            _widen(module, model.compute_dtype)


def _widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters that are computed with; tables and packed weights stay as they are."""
    if isinstance(module, Embedding) or (isinstance(module, Linear | ExpertLinear) and module.packed_bytes):
        return
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.dtype != dtype:
            setattr(module, key, nn.Parameter(parameter.to(dtype), requires_grad=False))


def _memory(empty: torch.Tensor, device: torch.device, *, stays: bool) -> torch.Tensor:
    """Not `empty_like`: of a meta tensor that imports a symbolic algebra library, a second or more of every start."""
    with for_good() if stays else nullcontext():
        return torch.empty_strided(empty.shape, empty.stride(), dtype=empty.dtype, device=device)


def _order(model: CausalLM, weights: Weights) -> list[str]:
    """Checkpoint names in the order in which `_materialize` fills them."""
    parts, seen = _parts(weights), {}
    for module in _children_first(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                seen.setdefault(id(parameter), [name for name, _ in parts.get(id(parameter), ())])
    return [name for names in seen.values() for name in names]


def _parts(weights: Weights) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """id of a parameter -> the checkpoint tensors it is made of. The views keep the parameter (and its id) alive."""
    parts: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, view in weights.items():
        parts.setdefault(id(view if view._base is None else view._base), []).append((name, view))
    return parts


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _finalize(module: nn.Module) -> None:
    settle = getattr(module, "finalize", None)
    if settle is not None:
        settle()


def _and_more(names: list[str]) -> str:
    """For messages: the first name, and how many more there are."""
    return msg("{name} (and {count} more)", name=names[0], count=len(names) - 1) if len(names) > 1 else names[0]
