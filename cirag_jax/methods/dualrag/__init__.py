"""DualRAG: reasoning-augmented querying and progressive knowledge aggregation."""
