"""Engines: the server's side, the client's side, and the transports between them."""
