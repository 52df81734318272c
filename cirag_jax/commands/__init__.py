"""The commands of ``launch/``: the only layer that loads models and uses all other layers."""
