"""What runs are judged by from outside: whether a mechanism keeps its promise."""
