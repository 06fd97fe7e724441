"""Gpu."""

from appliance.service.words import t
from tui.steps.body import StepBody


class GpuBody(StepBody):
    STEP = "gpu"
    LEAD = t("Can this machine run what was brought?")
