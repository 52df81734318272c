"""What `launch/` calls: the one layer that opens models and composes the rest."""
