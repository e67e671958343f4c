"""The lean CPU path: kernels in C++, built where they run, and the runner that uses them.

Nothing outside this package knows that a compiler was involved; without one everything works on torch alone.
"""
