"""Differential privacy: mechanisms, accounting, ledgers, and the guarantee of a run."""
