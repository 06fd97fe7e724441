"""What surrounds every step: the header, the rail of steps, the keys at the bottom, and what they act on."""
