"""Every setting of the engine, with vLLM's flag names and meanings."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from engine.setting import setting

Device = Literal["auto", "cpu", "cuda"]
# The keys of the tables in engine.text.parsers, repeated here for code that must not import those
ToolCallParser = Literal["auto", "none", "gemma4", "hermes", "llama3_json", "llama4_json", "mistral", "qwen3_coder",
                         "qwen3_json", "qwen3_xml"]
PoolingChoice = Literal["last", "mean"]  # engine.core.request.Pooling
ReasoningParser = Literal["auto", "none", "deepseek_r1", "gemma4", "mistral", "qwen3"]

PAGE_SIZES = (8, 16, 32, 64)
TABLE_PLACES = ("host", "gpu")  # where a lookup table may be kept
STATE_DTYPES = ("float32", "bfloat16")  # dtypes in which a recurrent layer may keep its state
# Default tokens per page. The GPU's kernels work best with 16. On a CPU, short answers waste less in pages of 8
# (docs/performance/constants.md).
DEFAULT_PAGE_SIZE = {"cpu": 8, "cuda": 16}

_DTYPES = {"auto": "auto", "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32",
           "float32": "float32"}
_LOAD_FORMATS = {"auto": "auto", "safetensors": "safetensors", "dummy": "dummy", "runai_streamer": "safetensors",
                 "fastsafetensors": "safetensors"}


@dataclass(slots=True)
class EngineConfig:
    """How to run one model. Construction does not touch the disk or the device; `build_engine` validates.

    `max_model_len` None takes the model's own limit (fitted to memory, with a note, if it does not fit); "auto" asks
    for the largest that fits; a number is honoured or refused. `gpu_memory_utilization` is the share of the device's
    total memory that weights, activations and KV pages may use together (on CPU: of the memory now available, for KV
    only, unless `kv_cache_memory_bytes` is given).
    """

    model: Path = setting(
        MISSING, "the model directory, if not given as first argument", group="model", metavar="MODEL_DIR",
        as_text=True)
    served_model_name: list[str] = setting(
        None, "name(s) that clients use; the first is shown in answers (default: the path as given)",
        factory=list, group="model", metavar="NAME", many=True)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "precision of weights and activations ({default})", group="model", choices=_DTYPES)
    quantization: str | None = setting(
        None, "quantise weights, where the device can; int4 on a GPU also turns the output head into int8",
        group="model", metavar="METHOD", aliases=("-q",))
    kv_cache_dtype: str = setting(
        "auto", "precision of the KV cache ({default})", group="memory", metavar="DTYPE")
    load_format: Literal["auto", "safetensors", "dummy"] = setting(
        "auto", "auto, safetensors, or dummy for random weights ({default})", group="model", metavar="FORMAT",
        choices=_LOAD_FORMATS)
    device: Device = setting("auto", "where to run ({default})", group="model")
    max_model_len: int | Literal["auto"] | None = setting(
        None, "context in tokens, prompt plus answer; auto or -1: the largest that fits", group="memory",
        metavar="TOKENS", size=True, at_least=1)
    gpu_memory_utilization: float = setting(
        0.9, "share of the device's memory to use, above 0 and at most 1 ({default})", group="memory",
        metavar="SHARE", above=0, at_most=1)
    kv_cache_memory_bytes: int | None = setting(
        None, "bytes for the KV cache, instead of a share", group="memory", metavar="BYTES", size=True, at_least=1)
    block_size: int | None = setting(  # one of PAGE_SIZES; None: by device
        None, "tokens a page (8 on a CPU, 16 on a GPU)", group="memory", metavar="TOKENS",
        choices=PAGE_SIZES)
    max_num_seqs: int | None = setting(  # None: 256 on CPU, 1024 on a GPU, fitted to memory
        None, "sequences that run at a time", group="scheduling", metavar="N", size=True, at_least=1)
    # None: 512 on CPU; on a GPU 8192, or what suits its memory (planner.py)
    max_num_batched_tokens: int | None = setting(
        None, "tokens of one step", group="scheduling", metavar="N", size=True, at_least=1)
    # None: 60 on a GPU; 0 on a CPU, and offline (LLM)
    max_itl_ms: int | None = setting(
        None, "longest wait between two tokens of an answer that other requests' prompts may cause, in milliseconds; "
        "0: no limit", group="scheduling", metavar="MS", at_least=0)
    tensor_parallel_size: int = setting(
        1, "GPUs to split over ({default})", group="scheduling", metavar="N", aliases=("-tp",), at_least=1)
    enable_chunked_prefill: bool = setting(True, "split long prompts over steps ({default})", group="scheduling")
    enable_prefix_caching: bool = setting(
        True, "reuse the pages of prompts that begin alike ({default})", group="scheduling")
    enforce_eager: bool = setting(False, "no CUDA graphs ({default})", group="scheduling")
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "order of waiting requests ({default})", group="scheduling")
    overlap: bool | None = None  # schedule step N+1 while step N runs; None: only where it helps (GPU)
    seed: int | None = setting(None, "base of the seeds of requests without one (random)", group="model")
    skip_tokenizer_init: bool = False
    tool_call_parser: ToolCallParser = setting(
        "auto", "how the model writes tool calls; auto asks its template, none leaves them in the text ({default})",
        group="model", metavar="NAME")
    reasoning_parser: ReasoningParser = setting(
        "auto", "how the model marks its reasoning; auto asks its vocabulary, none leaves it in the text ({default})",
        group="model", metavar="NAME")
    enable_auto_tool_choice: bool = setting(
        True, "tools may be called without a request demanding it ({default})", group="model")
    pooling: PoolingChoice = setting(
        "last", "what an embedding is made of: the last token's hidden state, or the mean of all ({default})",
        group="model")
    per_layer_embeddings: Literal["auto", "host", "gpu"] = setting(  # the table of Gemma 4 E2B, E4B
        "auto", "where Gemma 4 E2B's and E4B's are: auto takes the host where it has room, else the GPU ({default})",
        group="memory")
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "precision of recurrent layers' states; auto takes the model's own ({default})", group="memory")
    # A request's result has the same bits in any batch; slower (GPU only).
    batch_invariant: bool = setting(
        False, "the same bits for a request in any batch, at the price of speed ({default})", group="scheduling")
    disable_cascade_attn: bool = setting(  # GPU only
        False, "while answering, read a prefix that requests share separately for each of them ({default})",
        group="scheduling")

    quantized_activations: Literal["auto", "none"] = setting(
        "auto", "round the activations of several tokens to fp8 where the weight is int4 or fp8 in blocks and the GPU "
        "has fp8 units; none: 16 bits ({default})", group="model")
    int4_copy: Literal["auto", "never"] = setting(
        "auto", "a second copy of int4 weights, in fp8, makes large batches faster; auto keeps it where a third of the "
        "free memory holds it ({default})", group="memory")

    def __post_init__(self) -> None:
        self.model = Path(self.model)

    @property
    def model_name(self) -> str:
        return self.served_model_name[0] if self.served_model_name else str(self.model)
