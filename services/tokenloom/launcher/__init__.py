"""`tokenloom serve`: all stages on one machine, as supervised processes that talk over Unix sockets."""
