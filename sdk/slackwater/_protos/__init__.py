"""The wire contract; a copy made by scripts/gen_protos.py of what lies in protos/."""
