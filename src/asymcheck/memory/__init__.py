"""Host memory: where captured bytes wait until they are durable."""
