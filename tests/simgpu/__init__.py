"""A pretend accelerator: what GPUs do to code that waits too little, on any machine with a C++ compiler.

csrc/       the device: streams that are threads, an allocator that overwrites what is freed, operators, counters
build       one call of the compiler, kept in .cache/simgpu
device      its registration with torch, its scheduling modes, its counters
simccl      a process group with NCCL's semantics, over gloo
server      the process in which all of that lives, and forks ranks: nothing of it is ever in the process of the tests
bodies      what is trained on it
rare        what a plain training does not do: reads at once after writes, late files, failures
plans       trainings whose memory is held against a plan
faults      waits of zeroshard's that are taken out, one at a time
"""
