"""Engine processes: chosen, installed, started, fenced, watched and ended."""
