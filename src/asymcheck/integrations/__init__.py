"""What asymcheck knows of other frameworks; each is imported only where its objects are met."""
