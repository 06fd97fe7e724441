"""Install."""

from appliance.service.words import t
from tui.steps.body import StepBody


class InstallBody(StepBody):
    STEP = "install"
    LEAD = t("First the plan, then the work. It goes on if this terminal is lost.")
