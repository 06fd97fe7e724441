"""A small time series on the disk, without a server: samples of the gateway's /metrics and of the GPUs, and queries
over any window.

One process writes (`Recorder`), any number read (`Series`).
"""

from appliance.series.reader import Series, Window
from appliance.series.recorder import Recorder
from appliance.series.store import Opened, SeriesError, Store

__all__ = ["Opened", "Recorder", "Series", "SeriesError", "Store", "Window"]
