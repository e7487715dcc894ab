"""An OpenAI-compatible server that tells what it reused."""
