"""`atoll status`: one screen."""

from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say_rows, spoken, told
from appliance.engines import engine_facts
from appliance.service.dashboard.cells import STATES, duration
from appliance.service.words import human_bytes
from installer.access.api_keys import shown_name
from installer.base.errors import ExitCode
from installer.base.i18n import joined, t
from installer.operate.status import status
from installer.support.logs import printable

_HELP = """Show on one screen what is installed, whether it serves and since when, who approved it, and what is wrong.

Each problem is shown with the command to run next. Other users than root see what they may read, and a list of what
they could not see.
"""
_PHASES = {
    "running": t("running"), "starting": t("starting"), "restarting": t("restarting"), "stopped": t("stopped"),
    "failed": t("failed"), "dead": t("dead"), "unknown": t("unknown"),
}  # fmt: skip
_ACCEPTED = {"interactive": t("interactive"), "answer": t("answer"), "not required": t("not required")}
_EXIT_CODES = "Exit codes: 0 it serves and nothing is wrong, 2 nothing is installed, 40 not healthy."


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    epilog = examples("atoll status", "atoll status --plan", "atoll status --json", then=_EXIT_CODES)
    app.command(name="status", help=_HELP, epilog=epilog)(command)


def command(
    prefix: Prefix = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the complete memory plan of each model.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        facts = status(layout)
        engines = [*(str(model["instance"]) for model in facts["models"]), *facts["replicas"]]
        facts["engines"] = engine_facts(layout, engines)
        if as_json:
            print_json(facts)
        else:
            shown = ((name, printable(spoken(text))) for name, text in rows(facts, plan=plan))
            say_rows(shown, width=11, gap=1)
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
        text = t("{name} {version}  sequence {sequence}  {digest}…  signed by {key}…", name=_named(model),
                 version=model["version"], sequence=model["sequence"], digest=str(model["digest"])[:16],
                 key=str(model["key_fingerprint"])[:16])
        found.append((t("model"), text))
        engine = facts["engines"].get(model["instance"], {})
        found += [*_memory(engine, plan), *_kernels(engine)]
        for replica in (name for name, of in facts["replicas"].items() if of == model["instance"]):
            found.append((t("replica"), t("{replica} of {model}", replica=replica, model=model["instance"])))
            found += _memory(facts["engines"].get(replica, {}), plan)
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
    parts: list[str] = [STATES[facts["state"]]]
    if facts["state"] == "serving" and not facts["healthy"]:
        parts = [t("{state}, with problems", state=parts[0])]
    if uptime is not None:
        parts.append(t("up {duration}", duration=duration(uptime)))
    if facts["busy"]:
        parts.append(t("({holder})", holder=facts["busy"]))
    return t("state"), joined(parts, "  ")


def _memory(engine: dict[str, Any], full: bool) -> list[tuple[str, str]]:
    table = [line for line in engine.get("memory_plan", "").splitlines() if line.strip()]
    if full and table:
        return [(t("memory"), table[0]), *(("", line) for line in table[1:])]
    if engine.get("state") == "ready":
        text = t("{cache:,} tokens of cache, {requests:,} requests at once, context {context:,} tokens, {dtype} on "
                 "{device}", cache=engine["cache_tokens"], requests=engine["max_num_seqs"],
                 context=engine["max_model_len"], dtype=engine["dtype"], device=engine["device"])
        return [(t("memory"), text)]
    if engine.get("progress"):
        return [(t("memory"), t("loading: {progress}", progress=engine["progress"]))]
    if planned := engine.get("planned"):
        text = t("{size:.2f} GiB of KV cache; {count:,} requests of {context:,} tokens fit at the same time",
                 size=planned["kv_cache"] / 2**30, count=planned["full_length_requests"],
                 context=planned["max_model_len"])  # fmt: skip
        return [(t("memory"), text)]
    return []


def _kernels(engine: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the GPU kernels of the last start came from: those that had to be compiled made it slower."""
    counts = engine.get("kernels") or {}
    if not any(counts.values()):
        return []
    text = t("{release} came with the release, {cached} were in the cache, {compiled} were compiled at the last start",
             release=counts.get("release", 0), cached=counts.get("cached", 0), compiled=counts.get("compiled", 0))
    return [(t("kernels"), text)]


def _service(facts: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    if facts["units"]:
        words = []
        for unit in facts["units"]:
            name = unit["name"].removeprefix("atoll-").removesuffix(".service")
            word: str = f"{name} {unit['active']}"
            if unit["restarts"]:
                word = t("{unit} ({count} restarts)", unit=word, count=unit["restarts"])
            words.append(word)
        found.append((t("units"), joined(words, " · ")))
    else:
        service = facts["service"]
        what = t("process {pid}", pid=service["pid"]) if service["pid"] else _PHASES.get(service["phase"], "?")
        if service["restarts"]:
            what = t("{service}, {count} restarts", service=what, count=service["restarts"])
        found.append((t("service"), what))
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
        how = _ACCEPTED.get(entry["how"], entry["how"])
        text = t("{spdx}, {how}, by {who} at {when}", spdx=entry["spdx"], how=how, who=who, when=entry["when"])
        found.append((t("licence"), text))
    if certificate := facts["certificate"]:
        made = t("local authority") if certificate["source"] == "local" else t("imported")
        text = t("{made}, ends {at} ({days} days)", made=made, at=certificate["not_after"],
                 days=certificate["days_left"])
        found.append((t("certificate"), text))
    for key in facts["keys"][:4]:
        ends = t("ends {at}", at=key["expires"]) if key["expires"] else t("no end")
        if key["state"] == "expired":
            ends = t("EXPIRED {at}", at=key["expires"])
        what = joined([key["id"], shown_name(key)], "  ")
        found.append((t("key"), joined([what, "+".join(key["scopes"]), ends])))
    if len(facts["keys"]) > 4:
        found.append(("", t("and {count} more: atoll apikey list", count=len(facts["keys"]) - 4)))
    return found


def _disk(facts: dict[str, Any]) -> list[tuple[str, str]]:
    disk = facts["disk"]
    if not disk:
        return []
    text = t("models {models}, free {free}", models=human_bytes(disk["models_bytes"]),
             free=human_bytes(disk["free_bytes"]))  # fmt: skip
    return [(t("disk"), text)]


def _gpu(gpu: dict[str, Any], driver: str | None) -> str:
    parts: list[str] = [f"{gpu['index']}  {gpu['name'] or gpu['uuid']}"]
    if gpu["memory_total"] and gpu["memory_used"] is not None:
        used, total = human_bytes(gpu["memory_used"]), human_bytes(gpu["memory_total"])
        parts.append(t("{used} of {total} in use", used=used, total=total))
    if gpu["temperature"] is not None:
        parts.append(f"{gpu['temperature']} °C")
    return joined([*parts, t("driver {version}", version=driver)] if driver else parts)


def _named(model: dict[str, Any]) -> str:
    same = model["instance"] == model["name"]
    return str(model["name"]) if same else f"{model['instance']}: {model['name']}"


def _some(items: list[str], most: int) -> str:
    listed = joined(items[:most])
    return listed if len(items) <= most else t("{names} and {count} more", names=listed, count=len(items) - most)
