"""One training step: everything that torch's events set off. Each file answers one question of a reader.

From below to above, as files import each other (`tests/project/test_architecture.py` holds the order):

    layout, blocks, placement      who owns element i?
    quantised                      what is a frozen 4-bit weight?
    named_parameter, model_tree,   what is it called, and which unit has it?
    bucketing, modules
    transport/                     how do messages reach other ranks?
    storage/                       where is memory, and how does it move?
    context, step                  what do all parts share; what holds of this step?
    classes, appearance            what does a parameter without values answer?
    parameter_bucket               where is this rank's part?
    writes                         did the user write, and who gets it?
    gradient_bucket, norm          what has arrived, and what is its norm?
    reductions                     whose turn is it?
    module_hooks, unit             is it whole?
    schedule                       which unit is next, and which call is legal?
    saved_parameters               what did autograd keep?
    state_dicts, hooks             which torch event is this?
    resident, travelling, rounding, eight_bits, replicas,  how does the optimizer's step see this rank's part?
    gradient_operations,
    users_optimizer, sharded_step
    model_states, optimizer_states,  what is a state called? (the seam for all rooms above)
    parking
"""
