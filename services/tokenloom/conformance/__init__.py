"""Conformance: checks an executor, whatever it is written in, against executor.proto."""
