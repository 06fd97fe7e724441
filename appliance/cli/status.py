"""`atoll status`: one screen."""

import time
from typing import Annotated, Any

import typer
from rich.cells import set_cell_size

from appliance.cli.byte_progress import size
from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, told
from appliance.engines import engine_facts
from installer.errors import ExitCode
from installer.i18n import joined, language_of, t
from installer.i18n import told as in_language
from installer.logs import printable
from installer.status import status

_HELP = """One screen: what is installed, whether it serves, since when, with whose permission, and what is wrong.

Each problem comes with the next command. As another user than root it shows what it
can, and says what it could not see.
"""
_EXIT_CODES = "Exit codes: 0 it serves and nothing is wrong, 2 nothing is installed, 40 not healthy."


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    epilog = f"{examples('atoll status', 'atoll status --plan', 'atoll status --json')}\n\n{_EXIT_CODES}"
    app.command(name="status", help=_HELP, epilog=epilog)(command)


def command(
    prefix: Prefix = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the memory plan of each model in full.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        facts = status(layout)
        facts["engines"] = engine_facts(layout, [str(model["instance"]) for model in facts["models"]])
        if as_json:
            print_json(facts)
        else:
            language = language_of()
            for name, text in rows(facts, plan=plan):
                label = set_cell_size(in_language(name, language), 11)
                typer.echo(f"{label} {printable(in_language(text, language))}".rstrip())
    if not facts["healthy"]:
        raise typer.Exit(ExitCode.UNHEALTHY)


def rows(facts: dict[str, Any], *, plan: bool = False) -> list[tuple[str, str]]:
    """The screen, as (label, text)."""
    found = [_state(facts)]
    if facts["endpoint"]:
        found.append((t("endpoint"), facts["endpoint"]))
        if facts["endpoints"]:
            found.append(("", t("for others {urls}", urls=_some(facts["endpoints"], 2))))
    released = facts["release"]
    if released["committed"]:
        since, name = released["at"] or "?", released["committed"]
        text = t("{release}  since {at}", release=name, at=since)
        if before := released["previous"]:
            text = t("{release}  since {at}; before it {previous}", release=name, at=since, previous=before)
        found.append((t("release"), text))
    for model in facts["models"]:
        found.append((t("model"), f"{_named(model)} {model['version']}  sequence {model['sequence']}  "
                               f"{str(model['digest'])[:16]}…  signed by {str(model['key_fingerprint'])[:16]}…"))
        found += _memory(facts["engines"].get(model["instance"], {}), plan)
    for gpu in (facts["gpu"] or {}).get("gpus", ()):
        found.append(("GPU", _gpu(gpu, facts["gpu"]["driver"])))
    found += _service(facts)
    found += _permissions(facts)
    found += _disk(facts)
    for problem in facts["problems"]:
        found.append((t("PROBLEM") if problem["severity"] == "error" else t("warning"), problem["what"]))
        if problem["next"]:
            found.append(("", t("next: {command}", command=problem["next"])))
    if facts["unseen"]:
        found.append((t("not seen"), t("{what}; to see them: sudo atoll status", what=joined(facts["unseen"]))))
    return found


def _state(facts: dict[str, Any]) -> tuple[str, str]:
    uptime = facts["service"]["uptime_s"]
    since = f"  up {_duration(uptime)}" if uptime is not None else ""
    busy = f"  ({facts['busy']})" if facts["busy"] else ""
    sick = "" if facts["healthy"] or facts["state"] != "serving" else ", with problems"
    return t("state"), f"{facts['state'].upper()}{sick}{since}{busy}"


def _memory(engine: dict[str, Any], full: bool) -> list[tuple[str, str]]:
    table = [line for line in engine.get("memory_plan", "").splitlines() if line.strip()]
    if full and table:
        return [(t("memory"), table[0]), *(("", line) for line in table[1:])]
    if engine.get("state") == "ready":
        text = (f"{engine['cache_tokens']:,} tokens of cache, {engine['max_num_seqs']:,} requests at once, "
                f"context {engine['max_model_len']:,} tokens, {engine['dtype']} on {engine['device']}")
        return [(t("memory"), text)]
    if engine.get("progress"):
        return [(t("memory"), f"loading: {engine['progress']}")]
    short = [line.strip() for line in table if line.strip().startswith(("KV", "context"))]
    return [(t("memory") if i == 0 else "", " ".join(line.split())) for i, line in enumerate(short)]


def _service(facts: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    if facts["units"]:
        words = []
        for unit in facts["units"]:
            name = unit["name"].removeprefix("atoll-").removesuffix(".service")
            again = f" ({unit['restarts']} restarts)" if unit["restarts"] else ""
            words.append(f"{name} {unit['active']}{again}")
        found.append((t("units"), " · ".join(words)))
    else:
        service = facts["service"]
        what = f"process {service['pid']}" if service["pid"] else service["phase"]
        again = f", {service['restarts']} restarts" if service["restarts"] else ""
        found.append((t("service"), what + again))
    good = t("good") if facts["health"]["ok"] else t("bad")
    found.append((t("health"), t("{verdict}: {said}", verdict=good, said=facts["health"]["said"])))
    if smoke := facts["smoke"]:
        first, rate = f"{smoke['ttft_s'] * 1000:.0f}", f"{smoke['tokens_per_s']:.1f}"
        text = t("first token after {first} ms, then {rate} tokens/s", first=first, rate=rate)
        found.append((t("at install"), text))
    return found


def _permissions(facts: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    if verified := facts["last_verify"]:
        words = {"good": t("all as signed"), "bad": t("NOT AS SIGNED"), "interrupted": t("cut off")}
        text = t("{at} by {who}: {verdict}; {detail}", at=verified["at"], who=verified["by"],
                 verdict=words[verified["outcome"]], detail=verified["detail"])
        found.append((t("verified"), text))
    for entry in facts["licences"]:
        who = (entry.get("who") or {}).get("user", "?")
        found.append((t("licence"), f"{entry['spdx']}, {entry['how']}, by {who} at {entry['when']}"))
    if certificate := facts["certificate"]:
        made = t("local authority") if certificate["source"] == "local" else t("imported")
        text = t("{made}, ends {at} ({days} days)", made=made, at=certificate["not_after"],
                 days=certificate["days_left"])
        found.append((t("certificate"), text))
    for key in facts["keys"][:4]:
        ends = t("ends {at}", at=key["expires"]) if key["expires"] else t("no end")
        if key["state"] == "expired":
            ends = t("EXPIRED {at}", at=key["expires"])
        what = f"{key['id']}  {key['name']}, {'+'.join(key['scopes'])}"
        found.append((t("key"), joined([what, ends])))
    if len(facts["keys"]) > 4:
        found.append(("", t("and {count} more: atoll apikey list", count=len(facts["keys"]) - 4)))
    return found


def _disk(facts: dict[str, Any]) -> list[tuple[str, str]]:
    disk = facts["disk"]
    if not disk:
        return []
    text = t("models {models}, free {free}", models=size(disk["models_bytes"]), free=size(disk["free_bytes"]))
    return [(t("disk"), text)]


def _gpu(gpu: dict[str, Any], driver: str | None) -> str:
    parts = [f"{gpu['index']}  {gpu['name'] or gpu['uuid']}"]
    if gpu["memory_total"] and gpu["memory_used"] is not None:
        parts.append(f"{size(gpu['memory_used'])} of {size(gpu['memory_total'])} in use")
    if gpu["temperature"] is not None:
        parts.append(f"{gpu['temperature']} °C")
    return ", ".join([*parts, f"driver {driver}"] if driver else parts)


def _named(model: dict[str, Any]) -> str:
    same = model["instance"] == model["name"]
    return str(model["name"]) if same else f"{model['instance']}: {model['name']}"


def _some(items: list[str], most: int) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _duration(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return (f"{days} d " if days else "") + time.strftime("%H:%M:%S", time.gmtime(rest))
