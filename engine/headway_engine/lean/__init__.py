"""The lean path for accelerators: paged attention kernels, a Llama of few operations, decodes as graphs.

Nothing in it needs an accelerator but the kernels of others and the capture of graphs, so a CPU tests it.
"""
