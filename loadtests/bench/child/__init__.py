"""What runs inside a benchmark's engine process; the only part of the benchmarks that imports torch and vLLM."""
