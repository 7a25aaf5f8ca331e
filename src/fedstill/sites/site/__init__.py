"""A site's part: its policy, ledger, log, answers and node; nobody else reads these files."""
