"""What a test of a store or of a training script needs: suites, faults, crash points."""
