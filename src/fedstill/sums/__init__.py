"""Masked sums: a server learns the total of the clients' whole numbers and no client's own (``docs/sums.md``).

A client answers once: its numbers plus masks, and the seeds of the masks sealed to helpers. When the server has fixed
the set of clients, the helpers together hand it the sum of these masks. `masks` is the client's part, `helpers` the
helpers' part and what the server makes of it.
"""
