"""Load and cache benchmarks for jkv and for any OpenAI-compatible server."""
