"""One decoder, and where its weights and tokens come from."""
