"""The commands of ``launch/``. This layer may import all other layers; none imports it."""
