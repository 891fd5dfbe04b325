"""The messages between ranks: the only user of torch.distributed at run time.

`PointToPoint` is for gloo: each pair of ranks exchanges exactly the rows that the other one owns, straight from and into the
bucket's storage. Tags keep different operations apart if two ranks diverge. `SharedMemory` is for CPU ranks of one host. `Native`
is for backends whose own collectives can be used (NCCL and similar ones). `Alone` is one rank. `composed` combines two
transports: one inside hosts, and one across them.

On CPUs all of them sum over ranks in rank order (with `within`: inside each host, then over hosts), and then divide the sum, so it
does not depend on the policy. `Native` leaves the order of a sum to its backend.
"""
