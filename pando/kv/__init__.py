"""What is remembered: pages, segments, placements, the prefix tree and the plan of a step's reads."""
