"""``wisp bench``: what paging costs and gains, measured beside vLLM's own ways to run a model that does not fit.

The parent process decides and reports; every engine runs in a child process (`loadtests.bench.child`), so that memory
is really free before the next one starts. Needs neither Ray nor the service.
"""
