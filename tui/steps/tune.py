"""Tune."""

from appliance.service.words import t
from tui.steps.body import StepBody


class TuneBody(StepBody):
    STEP = "tune"
    LEAD = t("The settings that serve your users best, found by measuring.")
