"""Replay: feeds recorded plans to an executor and compares every token."""
