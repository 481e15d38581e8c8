"""What the coordinator shows of its ledger: watched, kept, and proven to the owner."""
