"""Why `atoll serve`, `engine` and `gateway` give up, in the operator's language.

The engine's errors are English and their texts are found in its source (installer/locale/engine_texts.py). Here is the
rest of what they say: argparse's words, as `FlagParser` passes them on, and what is put together from parts.
"""

from installer.i18n import foreign, language_of, retold, told

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


def told_here(text: str) -> str:
    """What the engine says, in the language that this terminal is set to: for `engine.errors.retelling`."""
    language = language_of()
    return text if language == "en" else told(retold(text), language)
