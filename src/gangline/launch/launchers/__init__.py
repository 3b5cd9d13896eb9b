"""How does a command that starts ranks with another launcher become the program of a rank, and its options ours?"""
