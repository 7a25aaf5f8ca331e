"""What somebody who sees uploads can learn from them of the records behind."""
