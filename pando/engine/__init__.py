"""Time: requests, the schedule, a step."""
