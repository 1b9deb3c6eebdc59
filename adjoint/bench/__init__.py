"""Times of ours beside torch and peers: the same work in the same run, and no time for a wrong result."""
