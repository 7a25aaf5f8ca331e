"""Training and evaluation of one model on one set of records."""
