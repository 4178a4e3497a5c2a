"""Test every kind of store under every fault: {plain, encrypted, tiers, Redis} x {kill, errno, power loss, memory, users, namespaces}.

    make store-matrix KILLS=100000
    python -m support.store_matrix --kind plain --fault kill --kills 1000

The same guarantees hold in every cell. A load returns the bytes that were saved for these tokens and this identity, or a miss. No method of
a store raises an error, and no fault of memory, disk, server or time removes a good entry. Once the fault is over, saved entries are found.
Budgets hold at all times, and no unfinished files remain. ``tests/store/test_matrix.py`` runs every cell at a small size.
"""
