"""Tokenloom: LLM inference as gRPC services, one per pipeline stage."""

__version__ = "0.1.0"
