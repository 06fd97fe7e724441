"""The presets of the white paper, as the commands that it prints: only the program's name is ours."""

GEMMA4 = (
    "atoll serve {model} --dtype bfloat16 --quantization fp8 --kv-cache-dtype fp8 --gpu-memory-utilization 0.95 "
    "--tensor-parallel-size 1 --max-num-seqs 8 --max-model-len 32767 --enable-chunked-prefill --enable-prefix-caching"
)
QWEN36 = "atoll serve {model} --quantization fp8 --gpu-memory-utilization 0.9 --max-model-len 32768"

# By the name of the model's directory in engine/bench/configs.
COMMANDS = {"gemma4-31b": GEMMA4, "gemma4-26b-a4b": GEMMA4, "qwen3.6-27b": QWEN36}


def argv(name: str, model: object) -> list[str]:
    """What `atoll serve` is called with."""
    return COMMANDS[name].format(model=model).split()[2:]
