"""The planning room: numbers in, choices out. No torch, no files, no threads, no clock."""
