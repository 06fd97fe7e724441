"""vLLM flags that scripts carry and that Atoll has no setting for: accepted with a note, or refused with the reason."""

from engine.message import msg

OTHER_NAMES = {  # vLLM's flag -> our setting
    "--uvicorn-log-level": "log_level",
    "--disable-uvicorn-access-log": "access_log",
}
_LOCAL = msg("the model is a local directory and nothing is ever downloaded.")
_NO_COMPILE = "there is no compile step."
_NO_PROMPTS = "prompts and answers are never logged."

IGNORED_SWITCHES = {
    "disable-log-requests": _NO_PROMPTS,
    "enable-log-requests": _NO_PROMPTS,
    "disable-log-stats": "statistics are at /metrics.",
    "async-scheduling": "the engine overlaps scheduling wherever that helps.",
    "disable-frontend-multiprocessing": "gateway and engine are always two processes.",
    "enable-request-id-headers": "answers always carry X-Request-Id.",
    "disable-fastapi-docs": "the page /docs holds nothing about this server.",
    "language-model-only": "only text models are served.",
    "disable-custom-all-reduce": "the engine runs on one device.",
    "use-tqdm-on-load": "loading always shows its progress.",
    "enable-server-load-tracking": "the load is at /metrics.",
}
IGNORED_VALUES = {
    "swap-space": "preempted requests are recomputed, not swapped.",
    "max-log-len": _NO_PROMPTS,
    "download-dir": _LOCAL,
    "revision": _LOCAL,
    "tokenizer-revision": _LOCAL,
    "code-revision": _LOCAL,
    "tokenizer-mode": "the model's own fast tokenizer is used.",
    "distributed-executor-backend": "the engine runs on one device.",
    "compilation-config": _NO_COMPILE,
    "max-seq-len-to-capture": "graphs are chosen by the engine.",
    "max-cudagraph-capture-size": "graphs are chosen by the engine.",
    "limit-mm-per-prompt": "only text models are served.",
}
REFUSED_SWITCHES = {
    "trust-remote-code": msg("Atoll never runs code from a model directory; no flag changes that."),
    "enable-lora": msg("adapters are not supported; merge them into the weights."),
    "enable-expert-parallel": msg("a model cannot yet be split over several devices."),
}
REFUSED_VALUES = {
    "api-key": msg("a key on the command line is visible to every user of the machine; put it into a file of mode 0600 "
                   "and pass --api-key-file FILE."),
    "lora-modules": msg("adapters are not supported; merge them into the weights."),
    "hf-token": _LOCAL,
    "hf-overrides": msg("the model's config.json is taken as it is; change the file in the model directory."),
    "speculative-config": msg("speculative decoding is not available yet; leave the flag out."),
    "chat-template": msg("the template comes from the model directory, where the bundle's signature covers it."),
    "middleware": msg("Atoll loads no code from the command line."),
    "logits-processors": msg("Atoll loads no code from the command line."),
    "cpu-offload-gb": msg("weights stay on the device; choose a smaller or quantised model."),
}
ONLY_ONE = {
    ("--pipeline-parallel-size", "-pp"): msg("a model cannot yet be split over several devices."),
    ("--data-parallel-size", "-dp"): msg("one process serves one copy of the model; start several behind a balancer."),
    ("--api-server-count",): msg("one gateway process is enough for one engine."),
}
