"""What an operator should act on, in words, with the next step: what the status finds, and what the numbers say."""

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.service.dashboard.snapshot import Alert, GpuRow, ModelRow
from installer.base.i18n import t

HOT = 87              # °C: data-centre GPUs slow down from here on
KV_FULL = 0.97
ERROR_SHARE = 0.05    # of the last minute's requests
FEW_REQUESTS = 20     # below which a share says little


def alerts(
    facts: Mapping[str, Any], models: Sequence[ModelRow], gpus: Sequence[GpuRow], requests: Mapping[str, float],
    stale: bool,
) -> tuple[Alert, ...]:  # fmt: skip
    """Errors first. `facts` are those of `installer.operate.status`."""
    found = [
        Alert(f"status-{number}", problem["severity"], problem["what"], problem["next"])
        for number, problem in enumerate(facts.get("problems", ()))
    ]
    if facts.get("state") == "stopped":
        found.append(Alert("stopped", "error", t("The service is stopped."), "atoll start"))
    elif stale:
        found.append(Alert("metrics-stale", "error", t("The gateway's metrics do not answer."), "atoll status"))
    for model in models:
        found += _of_model(model)
    found += [Alert(f"hot-{gpu.index}", "warning",
                    t("GPU {index} is at {degrees} °C and may slow down.", index=gpu.index, degrees=gpu.temperature),
                    t("Check the fans and the room's cooling."))
              for gpu in gpus if gpu.temperature is not None and gpu.temperature >= HOT]  # fmt: skip
    total, failed = sum(requests.values()), requests.get("5xx", 0.0)
    if total >= FEW_REQUESTS and failed / total > ERROR_SHARE:
        found.append(Alert("errors", "error", t("{share:.0%} of the last minute's requests failed.",
                                                share=failed / total), "atoll logs"))  # fmt: skip
    return tuple(sorted(found, key=lambda alert: alert.severity != "error"))


def _of_model(model: ModelRow) -> list[Alert]:
    found = []
    if model.kv is not None and model.kv >= KV_FULL and model.preemptions:
        found.append(Alert(
            f"kv-{model.name}", "warning",
            t("{model}: the KV cache is full, {count} requests were preempted in the last minute.",
              model=model.name, count=model.preemptions), "atoll tune"))  # fmt: skip
    if model.slots and model.waiting > model.slots:
        found.append(Alert(
            f"queue-{model.name}", "warning",
            t("{model}: {waiting} requests wait, more than {slots} can run at once.", model=model.name,
              waiting=model.waiting, slots=model.slots), "atoll tune"))  # fmt: skip
    return found
