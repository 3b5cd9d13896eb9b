"""How is the cluster described? `gangline init`: names go in, a cluster.yaml comes out."""
