"""Pilot."""

from appliance.service.words import t
from tui.steps.body import StepBody


class PilotBody(StepBody):
    STEP = "pilot"
    LEAD = t("First a few users, then all, with a way back.")
