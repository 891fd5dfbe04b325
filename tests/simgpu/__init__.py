"""A simulated accelerator, which reveals missing waits as GPUs do, on any machine with a C++ compiler.

csrc/       the device: streams that are threads, an allocator that overwrites freed memory, operators, counters
build       one call of the compiler, whose result is kept in .cache/simgpu
device      the device's registration with torch, scheduling modes and counters
simccl      a process group with NCCL's semantics, over gloo
server      the process that has the device, and forks ranks: the process of the tests never has it
bodies      training runs on the device
rare        unusual training runs: reads right after writes, late files, failures
plans       training runs whose memory is compared with a plan
faults      zeroshard's waits, which are removed one at a time
"""
