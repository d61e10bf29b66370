"""Text to tokens and back: the public gRPC interface, chat templates, incremental decoding, stop strings."""
