"""`pando bench throughput`: whole engines, in the settings that the papers measured."""
