"""The machinery, in rooms. A room imports only from those above it in this list.

base        errors, files, processes, the hub; what is printed, and what paths mean
nets        language models: loading, reading and writing tokens, passes that fit into memory
scoring     the user's functions and tools, and a process for functions that aren't ours
rewards.py  verifiers
data        texts, labels, posts, comparisons and problems
services    what a script needs besides: the command line, the run's folder and logs, traces, other samplers
"""
