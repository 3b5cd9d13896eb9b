"""Start it: what will be started is rendered purely, then started thinly."""
