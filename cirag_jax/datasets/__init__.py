"""Questions and corpora: benchmarks, the JSONL folder, the embedded dataset, corpus policies."""
