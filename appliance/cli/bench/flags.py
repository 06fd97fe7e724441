"""Flags of `vllm bench serve` as scripts write them: underscores, several values after one flag, and flags that Atoll
refuses, each with its reason."""

from typing import Any

from appliance.cli.language.commands import Command
from installer.base.errors import usage_error
from installer.base.i18n import t

_SEVERAL = {"--goodput", "--metadata", "--header"}  # take every word up to the next flag

_NO_TOKENIZER = t("lengths are measured with the endpoint's own counts; no tokenizer is needed")
_NO_CODE = t("code from a model directory is never run")
_NO_ADAPTERS = t("adapters are not supported")
_USE_PROFILE = t("write the load as a traffic profile: --profile FILE")
_USE_REPORT = t("results are JSON; draw them with a tool of your own")
_DATASETS = t("datasets are random, sharegpt and custom")
REFUSED = {
    "--tokenizer": _NO_TOKENIZER, "--tokenizer-mode": _NO_TOKENIZER, "--skip-tokenizer-init": _NO_TOKENIZER,
    "--trust-remote-code": _NO_CODE,
    "--insecure": t("an endpoint is always checked; name its authority: --ca FILE"),
    "--lora-modules": _NO_ADAPTERS, "--lora-assignment": _NO_ADAPTERS,
    "--use-beam-search": t("beam search does not exist here"),
    "--logprobs": t("send it in the body: --extra-body '{{\"logprobs\": 1}}'"),
    "--ramp-up-strategy": _USE_PROFILE, "--ramp-up-start-rps": _USE_PROFILE, "--ramp-up-end-rps": _USE_PROFILE,
    "--probe-request-rate": _USE_PROFILE, "--self-timed": _USE_PROFILE, "--no-self-timed": _USE_PROFILE,
    "--plot-timeline": _USE_REPORT, "--plot-dataset-stats": _USE_REPORT, "--timeline-itl-thresholds": _USE_REPORT,
    "--chat-template-kwargs": t("send it in the body: --extra-body"),
    "--ready-check-timeout-sec": t("a run starts only once the endpoint answers"),
    "--request-id-prefix": t("requests carry no ids of their own"),
    "--sonnet-input-len": _DATASETS, "--sonnet-output-len": _DATASETS, "--sonnet-prefix-len": _DATASETS,
    "--hf-subset": _DATASETS, "--hf-split": _DATASETS, "--hf-output-len": _DATASETS, "--hf-name": _DATASETS,
    "--no-stream": t("every request is streamed: waiting times are read from the stream"),
    "--api-key": t("a key on a command line can be read by every user: --api-key-file FILE, or OPENAI_API_KEY"),
}  # fmt: skip


class VllmCommand(Command):
    """A command whose flags may be written as vLLM's scripts write them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                flag = name.replace("_", "-")
                if flag in REFUSED:
                    raise usage_error(t("{flag} is refused: {why}.", flag=flag, why=REFUSED[flag]),
                                      t("Supported flags: atoll bench serve --help"))  # fmt: skip
                words.append(f"{flag}{equals}{value}")
            elif flag in _SEVERAL and words[-1] != flag and not word.startswith("-"):
                words += [flag, word]
            else:
                words.append(word)
        return super().parse_args(ctx, words)
