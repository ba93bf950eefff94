"""The memory of several hosts as one store: an agent on each host, and who talks to them."""

from asymcheck.storage.peers.store import PeerStore, open_peers

__all__ = ["PeerStore", "open_peers"]
