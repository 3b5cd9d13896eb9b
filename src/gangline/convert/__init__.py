"""A configuration of another tool: what each of its keys means here, and the job or cluster file that says the same."""
