"""Model."""

from appliance.service.words import t
from tui.steps.body import StepBody


class ModelBody(StepBody):
    STEP = "model"
    LEAD = t("What runs here, and under which licence. Each text is read to its end.")
