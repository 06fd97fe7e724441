"""What the flags of `atoll bench serve` ask for: a profile, a target, prompts, percentiles."""

import json
import math
from typing import TYPE_CHECKING, Any

from installer.base.errors import usage_error
from installer.base.i18n import joined, t

if TYPE_CHECKING:
    from appliance.load.datasets import Dataset
    from appliance.load.profile import TrafficProfile
    from appliance.load.target import Target

_BACKENDS = {"openai": "completions", "vllm": "completions", "openai-chat": "chat", "transformers": "chat"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def profile_of(given: dict[str, Any]) -> "TrafficProfile":
    """The named profile, or vLLM's defaults, with what the flags change. Raises InstallError (usage)."""
    from pydantic import ValidationError

    from appliance.load.profile import MOST_CLIENTS, TrafficProfile, find_profile
    from installer.decide.answers import problems

    if given["backend"] is not None and given["backend"] not in _BACKENDS:
        raise usage_error(t("There is no backend '{name}'.", name=given["backend"]),
                          t("Backends are {names}.", names=joined(list(_BACKENDS))))
    if given["profile"] is not None:
        values = find_profile(given["profile"]).model_dump(mode="json", exclude_none=True)
        values["requests"] = given["num_prompts"] or values["requests"]
    else:
        values = {"name": given["dataset_name"] or "random", "input": 1024, "output": 128, "warmup": 0,
                  "endpoint": "completions", "requests": given["num_prompts"] or 1000, "arrival": {"clients": 1},
                  "ignore_eos": given["dataset_name"] in (None, "random")}  # fmt: skip
    ratio = given["range_ratio"] or 0.0
    for name, flag in (("input", "input_len"), ("output", "output_len")):
        if given[flag] is not None or (given["profile"] is None and ratio):
            length = given[flag] or values[name]
            values[name] = [max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))]
    if given["prefix_len"]:
        ends = values["input"] if isinstance(values["input"], list) else [values["input"]] * 2
        if given["profile"] is None:  # vLLM's prefix comes before the random part
            values["input"] = [end + given["prefix_len"] for end in ends]
        values["prefix"] = {"tokens": given["prefix_len"]}
    for name, flag in (("warmup", "num_warmups"), ("seed", "seed"), ("ignore_eos", "ignore_eos")):
        if given[flag] is not None:
            values[name] = given[flag]
    if given["backend"] is not None:
        values["endpoint"] = _BACKENDS[given["backend"]]
    elif given["endpoint"] is not None:
        values["endpoint"] = "chat" if "chat" in given["endpoint"] else "completions"
    sampling = {name: given[name] for name in _SAMPLING if given[name] is not None}
    values["sampling"] = {**values.get("sampling", {}), **sampling}
    rate = _rate(given["request_rate"])
    if rate is not None:
        values["arrival"] = {"rate": rate, "burstiness": given["burstiness"] or 1.0,
                             "max_concurrency": given["max_concurrency"]}  # fmt: skip
    elif given["max_concurrency"] is not None:
        values["arrival"] = {"clients": given["max_concurrency"]}
    elif given["request_rate"] is not None or given["profile"] is None:  # all at once
        values["arrival"] = {"clients": min(values["requests"], MOST_CLIENTS)}
    if rate is None and given["burstiness"] is not None:
        raise usage_error(t("--burstiness needs a --request-rate."), t("Give one, such as --request-rate 4."))
    try:
        return TrafficProfile.model_validate(values)
    except ValidationError as error:
        found = joined(problems(error, TrafficProfile), "; ")
        raise usage_error(t("These flags do not fit together: {names}.", names=found),
                          t("See: atoll bench serve --help")) from None


def target_of(given: dict[str, Any]) -> "Target":
    from appliance.load.target import Target, read_key

    url = given["base_url"] or f"http://{given['host'] or '127.0.0.1'}:{given['port'] or 8000}"
    headers = []
    for pair in given["header"] or ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        good = equals and name.replace("-", "").isalnum() and value.isprintable() and f"{name}{value}".isascii()
        if not good:
            raise usage_error(t("'{pair}' is not a header.", pair=pair), t("Write --header NAME=VALUE."))
        if name.lower() in ("authorization", "host", "content-length", "transfer-encoding"):
            raise usage_error(t("The header {name} is not set by hand.", name=name),
                              t("Keys come from --api-key-file FILE or OPENAI_API_KEY."))
        headers.append((name, value))
    return Target(url, model=given["served_model_name"] or given["model"], path=given["endpoint"],
                  key=read_key(given["api_key_file"]), ca=given["ca"], headers=tuple(headers))  # fmt: skip


def dataset_of(given: dict[str, Any], profile: "TrafficProfile") -> "Dataset | None":
    from appliance.load.datasets import read_dataset

    name, path = given["dataset_name"] or "random", given["dataset_path"]
    if name == "random":
        if path is not None:
            raise usage_error(t("--dataset-path belongs to --dataset-name sharegpt or custom."),
                              t("Name which one it is."))
        return None
    if name not in ("sharegpt", "custom"):
        raise usage_error(t("There is no dataset '{name}'.", name=name), t("Datasets are random, sharegpt and custom."))
    if path is None:
        raise usage_error(t("--dataset-name {name} needs a file.", name=name), t("Give it: --dataset-path FILE"))
    return read_dataset(name, path, profile.endpoint)


def _rate(text: str | None) -> float | None:
    if text is None or text.lower() == "inf":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise usage_error(t("'{rate}' is not a rate.", rate=text),
                          t("Give requests a second, such as 4 or 0.5, or inf."))
    return rate


def percentiles_of(text: str) -> tuple[float, ...]:
    try:
        wanted = tuple(dict.fromkeys([50.0, *(float(part) for part in text.split(",") if part.strip())]))
    except ValueError:
        wanted = (-1.0,)
    if not all(0 < each < 100 for each in wanted):
        raise usage_error(t("'{text}' is not a list of percentiles.", text=text), t("Write it as 50,95,99."))
    return wanted


def extra_of(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text) if text else {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise usage_error(t("--extra-body is not a JSON object."), t("Write it as '{{\"top_k\": 20}}'."))
    return values
