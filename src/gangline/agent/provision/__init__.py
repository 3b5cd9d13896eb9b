"""Files and environments, put in place on this host."""
