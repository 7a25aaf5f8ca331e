"""Common ground of every part: errors, files, random streams, settings, records and weights."""
