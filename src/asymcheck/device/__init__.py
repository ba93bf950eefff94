"""The only library room with torch: what the live state is, copying it out and back in."""
