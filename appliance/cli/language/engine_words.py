"""Why `atoll serve`, `engine`, `gateway` and `gpu-ready` give up, in the operator's language.

The engine's errors are English and their texts are found in its source (installer/locale/engine_texts.py). Here is the
rest of what they say: argparse's words, as `FlagParser` passes them on, and what is put together from parts.
"""

from installer.base.i18n import foreign, language_of, retold, told

WORDS = (
    foreign("{flag}: invalid choice: {value} (choose from {names})."),
    foreign("{flag}: invalid int value: {value}."),
    foreign("{flag}: invalid float value: {value}."),
    foreign("{flag}: expected one argument."),
    foreign("{flag}: expected at least one argument."),
    foreign("{flag}: ignored explicit argument {value}."),
    foreign("--{flag} {value}: No such file or directory."),
    foreign("--{flag} {value}: Permission denied."),
    foreign("--{flag} {value}: Is a directory."),
    foreign("--{flag} {value}: Name or service not known."),
    foreign("Address already in use"),
    foreign("Cannot assign requested address"),
    foreign("getpwnam(): name not found: {name}"),
    foreign("getgrnam(): name not found: {name}"),
    # sums, lists and ways
    foreign("weights {size}"),
    foreign("overhead {size}"),
    foreign("activations {size}"),
    foreign("graphs {size}"),
    foreign("step buffers {size}"),
    foreign("{name} (and {count} more)"),
    foreign("--ssl-certfile and --ssl-keyfile"),
    foreign("Raise --gpu-memory-utilization"),
    foreign("--quantization fp8 halves most of the weights"),
    foreign("--per-layer-embeddings host keeps {size} of them in host memory"),
    foreign("A smaller model or a larger GPU."),
    foreign("a smaller model or a larger GPU."),
    foreign("{available} are available, and {size} with {reserve} to spare are needed"),
    # how an engine ended
    foreign("ended with status {status}"),
    foreign("was killed by {signal}"),
    foreign("was killed by {signal} (out of memory?)"),
    foreign("The engine met a defect: {kind}."),
    foreign("Its log holds the traceback."),
    foreign("The engine process closed its connection."),
)

GPU_READY = (  # engine/server/process/gpu_ready.py
    foreign("waiting: {said}"),
    foreign("The GPU is not ready. {problem}\n  Next: {fix}"),
    foreign("{count} GPU ready, driver {driver}"),
    foreign("{count} GPUs ready, driver {driver}"),
    foreign("The NVIDIA driver is not loaded."),
    foreign("/dev/{node} does not exist."),
    foreign("The driver's library cannot be loaded: {error}."),
    foreign("reinstall the driver's packages"),
    foreign("Driver and library have different versions (the loaded driver is {driver})."),
    foreign("reboot, then keep the packages from upgrading: apt-mark hold 'nvidia-*'"),
    foreign("NVML answers: {said}."),
    foreign("The driver works, but finds no GPU."),
    foreign("an argument was refused"),
    foreign("not supported"),
    foreign("no permission"),
    foreign("the driver is not loaded"),
    foreign("a library function is missing"),
    foreign("the GPU has fallen off the bus"),
    foreign("the GPU must be reset"),
    foreign("driver and library have different versions"),
    foreign("unknown error"),
)


def told_here(text: str) -> str:
    """What the engine says, in the language that this terminal is set to: for `engine.errors.retelling`."""
    language = language_of()
    return text if language == "en" else told(retold(text), language)
