"""What a GPU runs between and around the matrix products, in Triton: one launch per step.

`attention.py` attends straight from the five integers of a row; `matmul.py` multiplies matrices;
`elementwise.py` norms, gates and rotates; `launch.py` lets one kernel begin before the last ends.

All kernels run under Triton's interpreter on a CPU as well. The tests check them that way where
there is no GPU.
"""
