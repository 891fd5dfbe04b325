"""The messages between ranks. Only this package sends through torch.distributed; torch's DTensors send their own messages.

`PointToPoint` is for gloo: each pair of ranks exchanges exactly the rows that the other one owns. Tags keep different operations
apart if two ranks diverge. `SharedMemory` is for CPU ranks of one host. `Native` is for backends whose own collectives can be used
(NCCL and similar ones). `Alone` is one rank. `composed` combines two transports: one inside hosts, and one across them.

On CPUs, all of them sum over ranks in rank order (with `within`: inside each host, then over hosts) and then divide the
sum. So a sum does not depend on the policy. `Native` leaves the order of a sum to its backend.
"""
