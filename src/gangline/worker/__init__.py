"""The part that trains: one process per rank, and the only folder with torch. Started, never imported, by others."""
