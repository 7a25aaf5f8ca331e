"""Audits: empirical lower bounds on the epsilon of a mechanism."""
