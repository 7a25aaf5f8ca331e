"""Audits of mechanisms: empirical lower bounds on epsilon."""
