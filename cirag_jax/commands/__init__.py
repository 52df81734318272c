"""The commands of ``launch/``: the only layer that opens models and composes the other layers."""
