"""The steps of the checklist, in their order. A step is one file with one subclass of `Step`; it joins here."""

from appliance.service.steps.base import Step
from appliance.service.steps.gpu import GpuStep
from appliance.service.steps.install import InstallStep
from appliance.service.steps.model import ModelStep
from appliance.service.steps.pilot import PilotStep
from appliance.service.steps.tune import TuneStep
from appliance.service.steps.verify import VerifyStep

STEPS: tuple[Step, ...] = (GpuStep(), ModelStep(), InstallStep(), TuneStep(), VerifyStep(), PilotStep())
