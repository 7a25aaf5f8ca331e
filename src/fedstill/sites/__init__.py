"""Deployments among real sites: policy, ledger, setup, the Flower app, a trial on loopback."""
