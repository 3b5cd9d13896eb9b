"""The part of `gangline prepare` on a host: reads what a step asks for, makes changes, and takes them back."""
