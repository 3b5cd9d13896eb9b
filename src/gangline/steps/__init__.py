"""The steps of the main path: what `app` puts one under the other."""
