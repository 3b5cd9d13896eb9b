"""The page of `gangline ui`: what every run does, for a browser on this computer."""
