"""A small load client: closed loop, streaming, from outside. Standard library only."""
