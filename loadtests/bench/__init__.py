"""``wisp bench`` (`loadtests.bench.cli`), and those of its benchmarks that compare engines.

The parent process decides and reports; every engine runs in a child process (`loadtests.bench.child`), so that memory
is really free before the next one starts. That needs neither Ray nor the service.
"""
