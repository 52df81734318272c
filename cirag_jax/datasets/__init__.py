"""Questions and corpora: benchmarks, the JSONL folder, the built-in dataset, corpus policies."""
