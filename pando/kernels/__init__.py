"""Tensor maths: imports nothing else of Pando."""
