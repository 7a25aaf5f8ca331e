"""Flower (flwr 1.41, 1.42): its simulation and deployment runtimes. No module outside this folder imports Flower.

Telemetry is switched off here before Flower is imported, for this process and its children.
"""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # flwr reads this only when it is imported
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
