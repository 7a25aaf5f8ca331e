"""The server's part of a deployment: its members, door, service and runs."""
