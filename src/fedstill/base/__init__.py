"""What every part stands on: errors, files, random streams, settings, records and weights."""
