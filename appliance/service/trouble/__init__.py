"""Trouble as an operator needs it: what happened, why, what was not changed, what to do, and the evidence."""

from appliance.service.trouble.derive import derive, of_error
from appliance.service.trouble.gather import gather, troubles
from appliance.service.trouble.record import Action, Scene, Trouble

__all__ = ["Action", "Scene", "Trouble", "derive", "gather", "of_error", "troubles"]
