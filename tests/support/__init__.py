"""Helpers of the tests: tiny models, scripted drafters, enumeration, a local Hub."""
