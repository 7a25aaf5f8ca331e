"""Deployments with real sites: policy, ledger, setup, the Flower app, a trial on this machine."""
