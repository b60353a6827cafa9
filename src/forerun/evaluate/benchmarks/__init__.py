"""Published benchmarks, a file each: how their data is read, what is asked, how an answer is
graded."""
