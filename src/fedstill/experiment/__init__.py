"""Experiments: configuration, run folders, and the tables, figures and pages made from them."""
