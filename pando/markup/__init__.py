"""Prompts with structure: PML to runs of tokens at their places."""
