"""Flower (flwr 1.41): its simulation runtime, and its deployment runtime. Nothing outside this folder knows Flower.

Telemetry is switched off here, for this process and for those that it starts, before Flower is imported.
"""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # flwr reads this once, when it is imported
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
