"""What runs a method: the server's side, the client's side, and the ways a message gets from one to the other."""
