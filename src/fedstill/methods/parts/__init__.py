"""Parts that several methods share: settings as mix-ins, and functions of a client or the server."""
