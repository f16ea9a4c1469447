"""What a plan costs before XLA has seen it: memory of each device, arithmetic, seconds."""
