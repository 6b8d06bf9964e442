"""Execution providers: how they are named, with which options, and which this machine has."""
