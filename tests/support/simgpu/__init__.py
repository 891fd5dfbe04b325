"""A simulated accelerator, which reveals missing waits as GPUs do, on any machine with a C++ compiler: see README.md."""
