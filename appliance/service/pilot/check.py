"""Whether a plan fits this installation: what only the installation knows, its API keys and limits."""

from appliance.service.pilot.plan import PilotPlan
from appliance.service.planning import cost
from installer.access import api_keys
from installer.base.errors import usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.release import config


def check(layout: Layout, plan: PilotPlan) -> None:
    """Before anything is changed: do the users exist, are the limits in force, are the costs numbers?

    Raises InstallError (usage).
    """
    cost.assumed(plan.cost)
    known = api_keys.usable(layout.api_keys)
    names = {str(entry["id"]) for entry in known} | {f"group:{entry.get('group')}" for entry in known} | {"*"}
    table = config.parse(config.read_text(layout.config) or "", layout.config,
                         "gateway" if layout.system else "serve").get("limits", {})  # fmt: skip
    in_force = table.get("max_in_flight_per_key", table.get("max-in-flight-per-key", 0))
    for stage in plan.stages:
        unknown = [user for user in stage.users if user not in names]
        if unknown:
            raise usage_error(t("Stage {name}: there is no usable API key for {users}.", name=stage.name,
                                users=joined(unknown)),
                              t("Look at the keys: {command}", command="atoll apikey list"))  # fmt: skip
        wanted = stage.max_in_flight_per_key
        if wanted is not None and wanted != in_force:
            raise usage_error(
                t("Stage {name}: {wanted} requests at a time are planned for each key, {now} are allowed.",
                  name=stage.name, wanted=wanted, now=in_force or t("any number")),
                t("Set max_in_flight_per_key = {wanted} in [{table}.limits] of {path}, then: atoll restart",
                  wanted=wanted, table="gateway" if layout.system else "serve", path=layout.config),
            )
