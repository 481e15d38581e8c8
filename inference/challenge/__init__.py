"""Capability challenges: exact integer work that shows what a machine can do, and its check at a fraction of the cost.

    context           what a challenge is bound to, and the keys derived from it
    expansion         from a key to matrices, the same bytes everywhere
    arithmetic        products mod 251: the port, and numpy
    torch_arithmetic  the same in torch, for CUDA and CPU; imported by a prover in an engine's environment only
    compute           chained products: what the card computes in a second
    memory            a fill that costs more to compute than to read, and a walk over it: memory and bandwidth
    memory_check      the walk's verifier
    commitment        Merkle trees over what is opened later
    schedule          sizes, deadlines, and challenges that start together
    prover            the prover as a process
    framing           how messages follow each other on its pipes
    wire              to and from protobuf

Verifiers need numpy only. What no challenge shows: which card it is, and that no other machine did the work.
"""
