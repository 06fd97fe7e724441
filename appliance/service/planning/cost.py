"""What tokens cost here: every assumption with its unit and source, each replaceable; the speed is a measured one.

GPUs for the average load, for its peaks and in reserve are counted separately, so that no cost is hidden.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.load.result import LoadResult
from installer.base.errors import usage_error
from installer.base.i18n import Text, joined, plain, reason, t

_HOURS = 8760.0
_MOST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Assumption:
    """`source`: where the default comes from. Money is in the currency of the operator's prices."""

    name: str
    default: float
    unit: str
    what: Text
    source: Text
    least: float = 0.0
    most: float = 1e9


_PLANNING = t("a planning value; replace it with your quotation")
_YOURS = t("an example; replace it with your own figure")

ASSUMPTIONS: tuple[Assumption, ...] = (
    Assumption("gpu_price", 30_000, "money/GPU", t("purchase of one GPU"), _PLANNING),
    Assumption("server_price", 40_000, "money/server", t("purchase of a server without GPUs"), _PLANNING),
    Assumption("gpus_per_server", 8, "GPU", t("GPUs that one server holds"), _PLANNING, 1, 64),
    Assumption("gpus_per_engine", 1, "GPU", t("GPUs of the engine that was measured"), t("the measurement"), 1, 64),
    Assumption("years", 4, "year", t("time over which the purchase is written off"), _YOURS, 0.5, 15),
    Assumption("gpu_power", 700, "W", t("power of one GPU under load"), t("the data sheet of an H100 SXM"), 1, 5000),
    Assumption("server_power", 1500, "W", t("power of a server without GPUs"), _PLANNING, 0, 20_000),
    Assumption("pue", 1.5, "", t("power of the whole data centre for each watt of the servers (PUE)"), _YOURS, 1, 4),
    Assumption("power_price", 0.12, "money/kWh", t("price of electricity"), _YOURS, 0, 100),
    Assumption("hosting", 6_000, "money/server/year", t("space, network and maintenance of a server"), _PLANNING),
    Assumption("staff_hours", 16, "h/month", t("work of operators"), _YOURS, 0, 10_000),
    Assumption("staff_price", 60, "money/h", t("cost of an operator's hour"), _YOURS, 0, 100_000),
    Assumption("requests_per_day", 20_000, "1/day", t("requests on an average day"), _YOURS, 1, 1e12),
    Assumption("tokens_per_request", 400, "token", t("tokens that an answer has on average"), _YOURS, 1, 1e7),
    Assumption("peak_factor", 4, "", t("load of the busiest hour relative to the average hour"), _YOURS, 1, 1000),
    Assumption("utilisation", 0.7, "", t("share of the measured speed to plan with"), _YOURS, 0.01, 1),
    Assumption("reserve_gpus", 1, "GPU", t("GPUs in reserve for failures"), _YOURS, 0, 10_000),
)
BY_NAME = {each.name: each for each in ASSUMPTIONS}


def assumed(*changes: Mapping[str, Any]) -> dict[str, float]:
    """The defaults with changes on top. Raises InstallError (usage) that names what is wrong."""
    values = {each.name: float(each.default) for each in ASSUMPTIONS}
    for name, value in (pair for change in changes for pair in change.items()):
        if name not in BY_NAME:
            raise usage_error(t("There is no assumption called '{name}'.", name=str(name)[:60]),
                              t("Assumptions are: {names}.", names=joined(list(BY_NAME))))  # fmt: skip
        about = BY_NAME[name]
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not about.least <= value <= about.most:
            raise usage_error(t("{name} is a number from {least:g} to {most:g}, not {value!r}.", name=name,
                                least=about.least, most=about.most, value=value),
                              t("Meaning: {what} ({unit}).", what=about.what, unit=about.unit or "1"))  # fmt: skip
        values[name] = float(value)
    return values


def of_words(words: list[str]) -> dict[str, float]:
    """`power_price=0.2`, repeated. Raises InstallError (usage)."""
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        try:
            found[name.strip()] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise usage_error(t("'{word}' is not an assumption.", word=word[:80]), t("Write --set power_price=0.15"))
    return found


def of_file(path: Path) -> dict[str, Any]:
    """Assumptions as TOML, at the top level or in a table [cost]. Raises InstallError (usage)."""
    try:
        data = path.read_bytes()
        if len(data) > _MOST_FILE:
            raise ValueError(t("it is larger than 1 MiB"))
        values = tomllib.loads(data.decode())
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else plain(error)
        raise usage_error(t("The assumptions {path} cannot be used: {why}.", path=path, why=why),
                          t("Print all of them: atoll cost --assumptions")) from None
    cost = values.get("cost")
    return cost if isinstance(cost, dict) else values


def per_hour(values: Mapping[str, float], gpus: float) -> dict[str, float]:
    """What this number of GPUs costs per hour, by item. Operators are not included: their cost does not grow with
    GPUs."""
    servers = gpus / values["gpus_per_server"]
    written_off = values["years"] * _HOURS
    watts = gpus * values["gpu_power"] + servers * values["server_power"]
    return {
        "gpus": gpus * values["gpu_price"] / written_off, "servers": servers * values["server_price"] / written_off,
        "power": watts / 1000 * values["pue"] * values["power_price"], "hosting": servers * values["hosting"] / _HOURS,
    }  # fmt: skip


def staff_per_hour(values: Mapping[str, float]) -> float:
    return values["staff_hours"] * values["staff_price"] * 12 / _HOURS


def cost(values: Mapping[str, float], load: LoadResult, baseline: LoadResult | None = None) -> dict[str, Any]:
    """The bill for the assumed load, at the measured speed. Raises InstallError (usage)."""
    speed = _speed(load)
    result = {"assumptions": dict(values), "measured": {"output_throughput": speed, "date": load.date,
              "model": load.model_id}, **_bill(values, speed)}  # fmt: skip
    if baseline is not None:
        slow = _speed(baseline)
        result["multiplier"] = speed / slow
        result["baseline"] = {"output_throughput": slow, "date": baseline.date, "backend": baseline.backend,
                              **_bill(values, slow)}  # fmt: skip
    return result


def _bill(values: Mapping[str, float], speed: float) -> dict[str, Any]:
    average = values["requests_per_day"] * values["tokens_per_request"] / 86_400
    engine = speed * values["utilisation"]
    engines = max(1, math.ceil(average / engine - 1e-9))
    at_peak = max(engines, math.ceil(average * values["peak_factor"] / engine - 1e-9))
    size = values["gpus_per_engine"]
    gpus = {"average": engines * size, "peaks": (at_peak - engines) * size, "reserve": values["reserve_gpus"]}
    hourly = {part: sum(per_hour(values, count).values()) for part, count in gpus.items()}
    hourly["operators"] = staff_per_hour(values)
    whole = sum(hourly.values())
    requests = values["requests_per_day"] / 24
    return {
        "gpus": gpus, "per_month": {part: each * _HOURS / 12 for part, each in hourly.items()},
        "items_per_month": {item: each * _HOURS / 12 for item, each in per_hour(values, sum(gpus.values())).items()},
        "total_per_month": whole * _HOURS / 12, "per_request": whole / requests,
        "per_million_tokens": whole / (requests * values["tokens_per_request"]) * 1e6,
    }  # fmt: skip


def _speed(load: LoadResult) -> float:
    if load.output_throughput <= 0 or load.completed <= 0:
        raise usage_error(t("The measurement contains no finished request."), t("Measure again: atoll bench serve"))
    return load.output_throughput
