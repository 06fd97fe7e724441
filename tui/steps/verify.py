"""Verify."""

from appliance.service.words import t
from tui.steps.body import StepBody


class VerifyBody(StepBody):
    STEP = "verify"
    LEAD = t("Does it keep its promises? Every number beside its target.")
