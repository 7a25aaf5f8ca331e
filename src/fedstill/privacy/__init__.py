"""What a run guarantees to the people whose records it used."""
